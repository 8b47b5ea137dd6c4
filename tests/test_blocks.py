"""Blocks and texts: nothing is lost, nothing is learnt twice, states are the target's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError
from draftahead.train import texts as texts_module
from draftahead.train.blocks import Block, Blocks
from draftahead.train.texts import NOTES, Texts, read_answers, read_prompts, write_answers

DEPTHS = (1, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


def numbered(count: int = 40, seed: int = 0) -> Texts:
    """Texts whose first two tokens are their number: no two are alike."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        sizes = torch.randint(1, 14, (2,), generator=generator).tolist()
        ids = torch.randint(0, zoo.VOCABULARY, (sum(sizes),), generator=generator).tolist()
        found.append(([number // 90, number % 90, *ids[: sizes[0]]], ids[sizes[0] :]))
    return Texts.of(found)


def learnt_of(block: Block) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every text of a block, and which of its places are learnt."""
    found = []
    for tokens, real, learnt in zip(block.tokens, block.real, block.learnt, strict=True):
        assert not learnt[~real].any()
        text = tuple(tokens[real].tolist())
        found.append((text, tuple(learnt[real].nonzero()[:, 0].tolist())))
    return found


def expected_of(texts: Texts, most: int = 10**6) -> list[Any]:
    found = []
    for index, answer in enumerate(texts.answers.tolist()):
        text = texts.text(index).tolist()
        cut = max(0, len(text) - most)
        first = max(1, answer - cut)  # the first token that is left cannot be foretold
        found.append((tuple(text[cut:]), tuple(range(first, len(text) - cut))))
    return found


def test_every_learnt_token_comes_once_an_epoch(model: Any) -> None:
    texts = numbered()
    blocks = Blocks(texts, model, DEPTHS, tokens=100)
    stream = blocks.from_step(0)
    orders = []
    for epoch in range(3):
        count = len(blocks._epoch(epoch))
        assert count > 5
        group = [next(stream) for _ in range(count)]
        seen = [entry for block in group for entry in learnt_of(block)]
        assert sorted(seen) == sorted(expected_of(texts))
        assert sum(len(places) for _, places in seen) == texts.learnt
        orders.append(seen)
        for block in group:
            assert block.tokens.numel() <= 100
            edge = block.tokens.shape[1] - block.window
            assert not block.learnt[:, :edge].any()
            assert block.learnt[:, edge].any()
    assert orders[0] != orders[1] != orders[2]


def test_long_texts_keep_their_end(model: Any) -> None:
    texts = numbered()
    for tokens, longest, most in ((1000, 8, 8), (9, None, 9), (9, 20, 9)):
        blocks = Blocks(texts, model, DEPTHS, tokens=tokens, longest=longest)
        seen = [entry for block in blocks.once() for entry in learnt_of(block)]
        assert max(len(text) for text, _ in seen) == most
        assert sorted(seen) == sorted(expected_of(texts, most))


@torch.no_grad()
def test_states_are_the_targets_own(model: Any) -> None:
    for block in Blocks(numbered(12), model, DEPTHS, tokens=100).once():
        for row in range(len(block.tokens)):
            real = block.real[row]
            text = block.tokens[row][real]
            assert block.positions[row][real].tolist() == list(range(len(text)))
            told = model(text[None], output_hidden_states=True).hidden_states
            for at, depth in enumerate(DEPTHS):
                assert torch.allclose(block.states[row, real, at], told[depth][0], atol=1e-4)
            assert torch.allclose(block.last[row, real], told[-1][0], atol=1e-4)


class Counted:
    """A decoder that counts its passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.runner = 0
        real = model.get_decoder()

        def decoder(**given: Any) -> Any:
            self.runner += 1
            return real(**given)

        monkeypatch.setattr(model, "get_decoder", lambda: decoder)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_kept_states_are_those_computed_anew(
    model: Any, on_disk: bool, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = numbered(20)
    room = round(share * len(texts.tokens) * (len(DEPTHS) + 1) * 32 * 4)
    folder = tmp_path / "states" if on_disk else None
    anew = Blocks(texts, model, DEPTHS, tokens=60).from_step(0)
    counted = Counted(monkeypatch, model)
    kept = Blocks(texts, model, DEPTHS, tokens=60, keep=room, folder=folder)
    count, stream = len(kept), kept.from_step(0)
    stored = kept._kept._store
    assert 0 < stored.numel() * 4 <= room
    if folder is not None:
        assert not list(folder.iterdir())  # its file has no name, and goes with the process
    for epoch in range(3):
        before = counted.runner
        for _ in range(len(kept._epoch(epoch))):
            mine, other = next(stream), next(anew)
            real = mine.real
            assert torch.equal(mine.tokens, other.tokens)
            assert torch.allclose(mine.states[real], other.states[real], atol=1e-4)
            assert torch.allclose(mine.last[real], other.last[real], atol=1e-4)
            assert mine.states.isfinite().all()
        # `anew` passes by the model as well: it was bound to it all along.
        mine_alone = counted.runner - before - len(kept._epoch(epoch))
        if epoch == 0:
            assert mine_alone == count
        else:
            assert mine_alone == 0 if share == 1.0 else mine_alone > 0


def test_memory_that_was_never_written_is_never_read_as_numbers(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text's padding reads what is kept before it: of a text that may not have come yet."""

    def dirty(*size: Any, **given: Any) -> torch.Tensor:
        return torch.full(size, torch.nan, **given)

    monkeypatch.setattr(torch, "empty", dirty)
    texts = numbered(20)
    blocks = Blocks(texts, model, DEPTHS, tokens=60, keep=10**7)
    monkeypatch.undo()
    group = sorted(range(len(texts)), key=lambda i: int(texts.lengths[i]))
    short, long = next(i for i in group if i > 2), group[-1]
    for index in (short, long):
        blocks._block([index])
    assert blocks._block([short, long]).states.isfinite().all()


def test_a_full_disk_is_told_of_before_the_work(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigError, match=r"no room for 0\.00 GB of states .*No space left"):
        Blocks(numbered(), model, DEPTHS, tokens=60, keep=10**6, folder=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another folder"):
        Blocks(numbered(), model, DEPTHS, tokens=60, keep=10**6, folder=tmp_path / "file")


def test_processes_share_the_texts(model: Any) -> None:
    texts = numbered()
    whole = Blocks(texts, model, DEPTHS, tokens=100)
    parts = [Blocks(texts, model, DEPTHS, tokens=100, share=(i, 3)) for i in range(3)]
    for epoch in range(3):
        all_groups = [tuple(group) for group in whole._epoch(epoch)]
        shares = [[tuple(group) for group in part._epoch(epoch)] for part in parts]
        assert len({len(share) for share in shares}) == 1
        joined = [group for share in shares for group in share]
        assert len(set(joined)) == len(joined)
        assert set(joined) <= set(all_groups)
        assert 0 <= len(all_groups) - len(joined) < 3
    with pytest.raises(ConfigError, match=r"90 processes and .* blocks"):
        next(Blocks(texts, model, DEPTHS, tokens=100, share=(0, 90)).from_step(0))


def test_blocks_from_a_step_do_not_ask_what_was_before(model: Any) -> None:
    blocks = Blocks(numbered(), model, DEPTHS, tokens=100, seed=3)
    stream = blocks.from_step(0)
    first = [next(stream).tokens for _ in range(2 * len(blocks) + 3)]
    later = Blocks(numbered(), model, DEPTHS, tokens=100, seed=3).from_step(len(first) - 1)
    assert torch.equal(next(later).tokens, first[-1])
    other = Blocks(numbered(), model, DEPTHS, tokens=100, seed=4).from_step(0)
    assert any(not torch.equal(next(other).tokens, tokens) for tokens in first)


def test_what_cannot_be_learnt_from_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="no text has an answer"):
        Blocks(Texts.of([([1, 2, 3], []), ([1], [2])]), model, DEPTHS, tokens=100)
    with pytest.raises(ConfigError, match=r"after 1 to 3 layers, not \[0, 2\]"):
        Blocks(numbered(), model, (0, 2), tokens=100)


# ---------------------------------------------------------------------------------- answers

SAID = SamplingParams(temperature=0.8, seed=5, max_tokens=6)


@pytest.fixture(scope="module")
def llm(model: Any) -> LLM:
    return LLM(model, "none", tokenizer=zoo.tokenizer(), max_batch=2, max_context=64)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "GROUPS", 2)


def tokens_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_answers_go_on_where_they_were(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = zoo.ragged_prompts(18)
    whole = write_answers(llm, prompts, tmp_path / "whole", sampling=SAID)
    assert len(whole) == 18
    asked = sorted(tuple(whole.text(i)[: int(whole.answers[i])].tolist()) for i in range(18))
    assert asked == sorted(map(tuple, prompts))
    for index in range(18):
        text, at = whole.text(index).tolist(), int(whole.answers[index])
        assert text[at:] == llm.generate(text[:at], SAID)[0].token_ids
    calls = 0
    real = llm.generate

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # within the third file: two batches to a file
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(llm, "generate", failing)
    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        write_answers(llm, prompts, part, sampling=SAID)
    assert sorted(tokens_in(part)) == [
        "answers-00000.safetensors",
        "answers-00001.safetensors",
        NOTES,
    ]
    calls, told = 100, list[tuple[int, int, int]]()
    found = write_answers(llm, prompts, part, sampling=SAID, told=lambda *said: told.append(said))
    assert calls == 100 + 6  # what was done is not done again
    assert [done for done, _, _ in told] == [1, 2, 3, 4, 5]
    assert tokens_in(part) == tokens_in(tmp_path / "whole")
    assert torch.equal(found.tokens, whole.tokens)


def test_parts_give_the_files_of_one_process(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(18)
    write_answers(llm, prompts, tmp_path / "one", sampling=SAID)
    for number in (2, 1, 3):
        write_answers(llm, prompts, tmp_path / "three", sampling=SAID, part=(number, 3))
    assert tokens_in(tmp_path / "three") == tokens_in(tmp_path / "one")


def test_a_batch_of_another_size_goes_on_as_well(llm: LLM, model: Any, tmp_path: Path) -> None:
    """One that was too large for the memory should not cost what was done."""
    prompts = zoo.ragged_prompts(18)
    write_answers(llm, prompts, tmp_path / "one", sampling=SAID)
    write_answers(llm, prompts, tmp_path / "two", sampling=SAID, part=(1, 3))
    small = LLM(model, "none", tokenizer=zoo.tokenizer(), max_batch=1, max_context=64)
    found = write_answers(small, prompts, tmp_path / "two", sampling=SAID)
    assert len(found) == 18
    assert tokens_in(tmp_path / "two") == tokens_in(tmp_path / "one")


def test_answers_of_another_kind_are_not_mixed(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(6)
    write_answers(llm, prompts, tmp_path, sampling=SAID)
    other = LLM(zoo.tiny("llama", dtype=torch.float32, seed=1), "none", max_batch=2, max_context=64)
    for which, asked, sampling in (
        (llm, prompts[:5], SAID),
        (llm, prompts, SamplingParams(temperature=0.7, seed=5, max_tokens=6)),
        (llm, prompts, SamplingParams(temperature=0.8, seed=5, max_tokens=7)),
        (other, prompts, SAID),
    ):
        with pytest.raises(ConfigError, match="name another folder, or delete that one"):
            write_answers(which, asked, tmp_path, sampling=sampling)
    assert len(write_answers(llm, prompts, tmp_path, sampling=SAID)) == 6
    (tmp_path / NOTES).write_text("{")
    with pytest.raises(ConfigError, match="name another folder, or delete that one"):
        write_answers(llm, prompts, tmp_path, sampling=SAID)


def test_prompts_too_long_are_left_out(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(8)
    found = write_answers(llm, prompts, tmp_path / "a", sampling=SAID, longest=9)
    assert len(found) == sum(len(prompt) <= 9 for prompt in prompts)
    with pytest.raises(ConfigError, match="no prompt has at most 2 tokens"):
        write_answers(llm, prompts, tmp_path / "b", sampling=SAID, longest=2)
    with pytest.raises(ConfigError, match="no room for prompts in a context of 64"):
        write_answers(llm, prompts, tmp_path / "c", sampling=SamplingParams(max_tokens=64))


def test_damaged_answers_say_so(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no answers: `draftahead train answers`"):
        read_answers(tmp_path)
    write_answers(llm, zoo.ragged_prompts(6), tmp_path, sampling=SAID)
    file = tmp_path / "answers-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"answers-00001.safetensors is damaged"):
        read_answers(tmp_path)


def test_prompts_are_read_as_they_are_given(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "w3 w4"}\n\n{"turns": ["w5", "w6"]}\n'
        '{"messages": [{"role": "user", "content": "w7"}]}\n{"text": "w8\u2028w9 w10"}\n',
        "utf-8",
    )
    prompts, whole = read_prompts(file, llm)
    assert prompts == [[3, 4, 1], [5, 1], [7, 1]]  # through the template
    assert whole is not None
    assert (whole.text(0).tolist(), whole.answers.tolist()) == ([8, 9, 10], [1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds nothing to learn from"),
        ('{"prompt": "w1"}\n{"question": "w2"}', "line 2: needs 'prompt', 'messages'"),
        ('{"prompt": "w1"', "line 1: needs"),
        ("[1, 2]", "line 1: needs"),
        ('{"turns": []}', "line 1: needs"),
        ('{"turns": "w1 w2"}', "turns are a list"),
        ('{"prompt": 3}', "a prompt is a text"),
        ('{"messages": ["x"]}', "line 1: .*cannot be turned into tokens"),
    ],
)
def test_prompts_that_are_none_name_their_line(
    llm: LLM, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(file, llm)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "missing.jsonl", llm)
