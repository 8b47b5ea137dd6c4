"""Where an output ends, also inside a run of accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftahead import Completion

Both = Callable[..., Completion]
LENGTH = 40


@pytest.fixture
def output(outputs: list[list[int]]) -> list[int]:
    """Of the prompt that `both` continues."""
    return outputs[1]


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 17])
def test_max_tokens_is_exact(both: Both, most: int) -> None:
    out = both(max_tokens=most)
    assert len(out.token_ids) == most
    assert out.finish_reason == "length"


@pytest.mark.parametrize("at", range(3, 12))
def test_stop_id_inside_an_accepted_run(both: Both, output: list[int], at: int) -> None:
    out = both(stop_token_ids=[output[at]])
    first = output.index(output[at])
    assert out.token_ids == output[: first + 1]
    assert out.text == text_of(output[:first])
    assert (out.finish_reason, out.stop_reason) == ("stop", output[at])
    shown = both(stop_token_ids=[output[at]], include_stop_str_in_output=True)
    assert (shown.text, shown.token_ids) == (text_of(out.token_ids), out.token_ids)


def test_eos_ends_and_can_be_ignored(target: Any, both: Both, output: list[int]) -> None:
    target.generation_config.eos_token_id = output[6]
    try:
        first = output.index(output[6])
        assert both().token_ids == output[: first + 1]
        assert both(ignore_eos=True).token_ids == output
        out = both(min_tokens=first + 4)
        assert len(out.token_ids) >= first + 4
        assert output[6] not in out.token_ids[: first + 3]
    finally:
        target.generation_config.eos_token_id = None


@pytest.mark.parametrize("at", range(3, 12))
def test_stop_string_across_tokens(both: Both, output: list[int], at: int) -> None:
    """It begins inside one accepted token and ends inside the next."""
    stop, text = f"{output[at]}><{output[at + 1]}", text_of(output)
    begin = text.index(stop)
    out = both(stop=["never", stop], logprobs=2)
    assert out.text == text[:begin]
    assert out.finish_reason == "stop"
    assert out.stop_reason == stop
    # All tokens up to the one that completes the stop stay, in ids and logprobs alike.
    assert out.token_ids == output[: text[: begin + len(stop)].count("<")]
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids) == len(out.drafted)


@pytest.mark.parametrize("before", range(1, 5))
def test_stop_string_waits_for_min_tokens(both: Both, output: list[int], before: int) -> None:
    """A stop string that came too early does not count later either, whatever longer ones stand
    beside it."""
    late = next(i for i in range(9, LENGTH) if output[i] not in output[:i])
    early = late - before
    stops = [f"<{output[early]}>", "x" * 40, f"<{output[late]}>"]
    out = both(stop=stops, min_tokens=late)
    stopping = (output[early], output[late])
    end = next(i for i in range(late - 1, LENGTH) if output[i] in stopping)
    assert out.token_ids == output[: end + 1]
    assert out.text == text_of(output[:end])


def test_bad_words_and_bias(both: Both, output: list[int]) -> None:
    out = both(bad_words=[[output[4]], [output[1], output[2]]])
    assert output[4] not in out.token_ids
    pairs = list(zip(out.token_ids, out.token_ids[1:], strict=False))
    assert (output[1], output[2]) not in pairs
    assert both(logit_bias={17: 1e4}, max_tokens=5).token_ids == [17] * 5
