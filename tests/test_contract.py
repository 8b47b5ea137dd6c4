"""The sampling contract under drafting: every field, also inside a run of accepted tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast

import zoo
from draftahead import LLM, Completion, SamplingParams
from draftahead.core.detokenizer import Detokenizer
from drafted import Clairvoyant

LENGTH = 40
PROMPTS = zoo.ragged_prompts(3)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def answers(target: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): zoo.reference(target, p, LENGTH) for p in PROMPTS}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Token i reads "<i>": stop strings can begin and end inside tokens."""
    model = models.WordLevel({f"<{i}>": i for i in range(zoo.VOCABULARY)}, unk_token="<0>")
    raw = Tokenizer(model)
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="module")
def drafted(target: Any, tokenizer: Any, answers: dict[tuple[int, ...], list[int]]) -> LLM:
    """Accepts about four guesses a step, so that every condition meets an accepted run."""
    return LLM(target, drafter=Clairvoyant(answers), tokenizer=tokenizer, max_batch=3)


@pytest.fixture(scope="module")
def plain(target: Any, tokenizer: Any) -> LLM:
    return LLM(target, drafter="none", tokenizer=tokenizer, max_batch=3)


def both(drafted: LLM, plain: LLM, sampling: SamplingParams, prompt: int = 1) -> Completion:
    """Generates with and without drafting, insists on the same, returns it."""
    one = drafted.generate(PROMPTS[prompt], sampling)[0]
    other = plain.generate(PROMPTS[prompt], sampling)[0]
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert one.finish_reason == other.finish_reason
    return one


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **fields})


@pytest.mark.parametrize("most", [1, 2, 3, 5, 17])
def test_max_tokens_is_exact(drafted: LLM, plain: LLM, most: int) -> None:
    out = both(drafted, plain, greedy(max_tokens=most))
    assert len(out.token_ids) == most
    assert out.finish_reason == "length"


@pytest.mark.parametrize("at", range(3, 12))
def test_stop_id_inside_an_accepted_run(
    drafted: LLM, plain: LLM, answers: dict[tuple[int, ...], list[int]], at: int
) -> None:
    answer = answers[tuple(PROMPTS[1])]
    out = both(drafted, plain, greedy(stop_token_ids=[answer[at]]))
    first = answer.index(answer[at])
    assert out.token_ids == answer[: first + 1]
    assert out.text == "".join(f"<{i}>" for i in answer[:first])
    assert out.finish_reason == "stop"


def test_eos_ends_and_can_be_ignored(
    target: Any, drafted: LLM, plain: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    answer = answers[tuple(PROMPTS[1])]
    target.generation_config.eos_token_id = answer[6]
    try:
        first = answer.index(answer[6])
        assert both(drafted, plain, greedy()).token_ids == answer[: first + 1]
        assert both(drafted, plain, greedy(ignore_eos=True)).token_ids == answer
        out = both(drafted, plain, greedy(min_tokens=first + 4))
        assert len(out.token_ids) >= first + 4
        assert answer[6] not in out.token_ids[: first + 3]
    finally:
        target.generation_config.eos_token_id = None


@pytest.mark.parametrize("at", range(3, 12))
def test_stop_string_across_tokens(
    drafted: LLM, plain: LLM, answers: dict[tuple[int, ...], list[int]], at: int
) -> None:
    """It begins inside one accepted token and ends inside the next."""
    answer = answers[tuple(PROMPTS[1])]
    stop = f"{answer[at]}><{answer[at + 1]}"
    text = "".join(f"<{i}>" for i in answer)
    begin = text.index(stop)
    out = both(drafted, plain, greedy(stop=["never", stop], logprobs=2))
    assert out.text == text[:begin]
    assert out.finish_reason == "stop"
    # The token in which the stop begins is gone, from ids and logprobs alike.
    assert out.token_ids == answer[: text[: begin + 1].count("<") - 1]
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids) == len(out.drafted)


def test_stop_string_waits_for_min_tokens(
    drafted: LLM, plain: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    """A stop string that came too early does not count later either, long stops beside it."""
    answer = answers[tuple(PROMPTS[1])]
    late = next(i for i in range(9, LENGTH) if answer[i] not in answer[:i])
    for before in range(1, 5):
        early = late - before
        stops = [f"<{answer[early]}>", "x" * 40, f"<{answer[late]}>"]
        out = both(drafted, plain, greedy(stop=stops, min_tokens=late))
        second = [i for i in range(late - 1, LENGTH) if answer[i] in (answer[early], answer[late])]
        assert out.token_ids == answer[: second[0]]


def test_stream_shows_what_generate_gives(drafted: LLM) -> None:
    whole = drafted.generate(PROMPTS[0], greedy())[0]
    pieces = list(drafted.stream(PROMPTS[0], greedy()))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    assert [d for piece in pieces for d in piece.drafted] == whole.drafted
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    assert {piece.finish_reason for piece in pieces[:-1]} == {None}
    assert any(whole.drafted)
    assert not all(whole.drafted)


def test_stream_never_shows_what_a_stop_takes_back(
    drafted: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    answer = answers[tuple(PROMPTS[1])]
    sampling = greedy(stop=f"<{answer[7]}><{answer[8]}>")
    whole = drafted.generate(PROMPTS[1], sampling)[0]
    pieces = list(drafted.stream(PROMPTS[1], sampling))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids


def test_streams_may_be_interleaved(drafted: LLM) -> None:
    """A step of one advances the other; neither loses anything."""
    expected = drafted.generate(PROMPTS[:2], greedy(max_tokens=12))
    streams = [drafted.stream(prompt, greedy(max_tokens=12)) for prompt in PROMPTS[:2]]
    seen: list[list[int]] = [[], []]
    open_ = {0, 1}
    while open_:
        for i in sorted(open_):
            piece = next(streams[i], None)
            if piece is None:
                open_.discard(i)
            else:
                seen[i] += piece.token_ids
    assert seen == [out.token_ids for out in expected]
    lone = drafted.stream(PROMPTS[0], greedy(max_tokens=12))
    first = next(lone).token_ids
    drafted.generate(PROMPTS[1], greedy())
    assert first + [i for piece in lone for i in piece.token_ids] == expected[0].token_ids


def test_a_dropped_stream_frees_its_row(drafted: LLM) -> None:
    for _ in range(5):
        stream = drafted.stream(PROMPTS[0], greedy())
        next(stream)
        stream.close()
    assert not drafted.engine.scheduler.running
    assert not drafted.engine.scheduler.waiting


def test_n_samples_differ_and_can_be_repeated(drafted: LLM, plain: LLM) -> None:
    warm = SamplingParams(temperature=1.0, max_tokens=16, n=5, seed=3)
    outs = drafted.generate(PROMPTS[0], warm)
    assert [out.sample for out in outs] == [0, 1, 2, 3, 4]
    assert len({tuple(out.token_ids) for out in outs}) == 5
    assert [o.token_ids for o in plain.generate(PROMPTS[0], warm)] == [o.token_ids for o in outs]
    fresh = drafted.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=16))[0]
    again = drafted.generate(
        PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=16, seed=fresh.seed)
    )[0]
    assert fresh.token_ids == again.token_ids


def test_bad_words_and_bias(
    drafted: LLM, plain: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    answer = answers[tuple(PROMPTS[1])]
    out = both(drafted, plain, greedy(bad_words=[[answer[4]], [answer[1], answer[2]]]))
    assert answer[4] not in out.token_ids
    pairs = list(zip(out.token_ids, out.token_ids[1:], strict=False))
    assert (answer[1], answer[2]) not in pairs
    forced = both(drafted, plain, greedy(logit_bias={17: 1e4}, max_tokens=5))
    assert forced.token_ids == [17] * 5


class Alternate(LogitsProcessor):
    """Even ids after odd ones and the other way round: depends on the path's last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            scores[row, last % 2 :: 2] = -torch.inf
        return scores


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_users_logits_processor_sees_the_nodes_path(
    drafted: LLM, plain: LLM, temperature: float
) -> None:
    out = both(drafted, plain, greedy(temperature=temperature, seed=1, processors=[Alternate()]))
    ids = [*PROMPTS[1][-1:], *out.token_ids]
    assert all((a + b) % 2 for a, b in itertools.pairwise(ids))


def test_logprobs_are_of_the_law_sampled_from(drafted: LLM, plain: LLM, target: Any) -> None:
    warm = SamplingParams(temperature=0.7, top_k=5, max_tokens=12, seed=2, logprobs=5)
    out = both(drafted, plain, warm)
    assert out.logprobs is not None
    ids = list(PROMPTS[1])
    for told in out.logprobs:
        logits = target(torch.tensor([ids])).logits[0, -1]
        values, top = logits.topk(5)
        law = (values / 0.7).softmax(-1).log()
        assert list(told.top) == top.tolist()
        assert list(told.top.values()) == pytest.approx(law.tolist(), abs=1e-4)
        assert told.logprob == pytest.approx(told.top[told.token_id], abs=1e-6)
        ids.append(told.token_id)
    raw = both(drafted, plain, greedy(max_tokens=3, logprobs=0, raw_logprobs=True))
    assert raw.logprobs is not None
    first = target(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    assert raw.logprobs[0].logprob == pytest.approx(float(first.max()), abs=1e-4)
    assert raw.logprobs[0].top == {}


def test_unset_fields_follow_the_generation_config(target: Any) -> None:
    from draftahead.loader.generation_config import with_model_defaults

    config = target.generation_config
    config.do_sample, config.temperature, config.top_k, config.max_new_tokens = True, 0.6, 3, 7
    config.min_p, config.repetition_penalty, config.bad_words_ids = 0.1, 1.5, [[4]]
    try:
        found = with_model_defaults(SamplingParams(), target, 100, has_tokenizer=False)
        assert (found.temperature, found.top_k, found.max_tokens) == (0.6, 3, 7)
        assert (found.min_p, found.repetition_penalty) == (0.1, 1.5)
        assert found.bad_words == [[4]]
        kept = with_model_defaults(
            SamplingParams(temperature=0, max_tokens=3), target, 100, has_tokenizer=False
        )
        assert (kept.temperature, kept.max_tokens) == (0, 3)
    finally:
        config.do_sample, config.temperature, config.top_k, config.max_new_tokens = [None] * 4
        config.min_p, config.repetition_penalty, config.bad_words_ids = [None] * 3
    assert with_model_defaults(SamplingParams(), target, 100, has_tokenizer=False).greedy


def test_penalties_by_hand() -> None:
    """Repetition over prompt and output, the other two over the output alone, counted."""
    from draftahead.sampling.noise import NodeContext
    from draftahead.sampling.processors import processed
    from toy import World

    setting = SamplingParams(
        temperature=1.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.0},
        bad_words=(),
    )
    sequence = World(0, setting, prompt=(0, 1)).sequence()
    sequence.tokens += [2, 2]
    found = processed(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), [NodeContext(sequence, (1,))])
    # 0: in the prompt. 1: in the prompt, and drafted once. 2: twice in the output. 3: biased.
    assert found.tolist() == [[2.0, -8.0 - 0.75, 2.0 - 1.0, 5.0]]


def test_a_processor_that_fails_ends_its_own_request(plain: LLM) -> None:
    from draftahead.errors import ProcessorError

    def explodes(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPTS[1]) + 3:
            raise RuntimeError("boom")
        return scores

    wide = greedy(processors=[lambda ids, scores: scores[:, :-1]])
    settings = [greedy(), greedy(processors=[explodes]), wide]
    outs = plain.generate(PROMPTS, settings, errors="return")
    assert [out.finish_reason for out in outs] == ["length", "error", "error"]
    assert isinstance(outs[1].error, ProcessorError)
    assert "boom" in str(outs[1].error)
    assert len(outs[1].token_ids) == 4


def test_greedy_takes_the_lowest_id_on_ties(target: Any) -> None:
    from draftahead.sampling.noise import NodeContext
    from draftahead.sampling.processors import probs_of
    from draftahead.sampling.sample import draw
    from toy import World

    context = NodeContext(World(0, greedy(repetition_penalty=1.0)).sequence())
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    assert draw(logits, [context])[0].tolist() == [1]
    assert probs_of(logits, [context]).tolist() == [[0, 1, 0, 0]]


def test_text_tail_completes_characters() -> None:
    data = "añ→😀 b".encode()
    tail = Detokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"), ["→😀"])
    shown = []
    for byte in data:
        tail.push(byte)
        shown.append(tail.text)
        assert "�" not in tail.text
    assert tail.text == data.decode()
    stop = Detokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"), ["→😀"])
    for byte in data[:-2]:
        stop.push(byte)
    at = stop.find_stop()
    assert at == 2
    assert stop.cut(at) == 3  # 'a' and the two bytes of 'ñ'
    assert stop.text == "añ"


def test_stats_add_up(drafted: LLM) -> None:
    out = drafted.generate(PROMPTS[0], greedy())[0]
    stats = out.stats
    assert stats.tokens == len(out.token_ids) == stats.steps + stats.accepted
    assert sum(out.drafted) == stats.accepted == sum(stats.accepted_at)
    assert stats.mean_acceptance_length == 1 + stats.accepted / stats.steps
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert all(a <= b for a, b in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.prompt_tokens == len(PROMPTS[0])
    assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds) > 0
