"""What a GPU needs of the engine, without one: a pass is sent before the last one is finished with,
its tokens may be known to the device alone, and its inputs travel in one block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, DrafterFaultWarning, SamplingParams
from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda.graphs import NodeInputs
from draftahead.backends.cuda.padding import Padding
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft, Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter
from draftahead.kv.cache import KVCache, LayerKVShape
from draftahead.models.runner import ModelRunner
from drafted import ALL, Clairvoyant
from test_eagle import wide

PROMPTS = zoo.ragged_prompts(4)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def ahead(target: Any, drafter: str, **options: Any) -> LLM:
    llm = LLM(target, ALL[drafter](target), max_batch=2, **options)
    llm.engine._ahead = True
    return llm


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter", ["none", "lookup", "draft_model_self", "garbage_tree"])
def test_texts_are_the_same(target: Any, drafter: str, sampling: SamplingParams) -> None:
    """More prompts than rows: sequences come and go between two passes."""
    there = LLM(target, ALL[drafter](target), max_batch=2).generate(PROMPTS, sampling)
    outs = ahead(target, drafter).generate(PROMPTS, sampling)
    assert [out.token_ids for out in outs] == [out.token_ids for out in there]
    assert [out.stats.steps for out in outs] == [out.stats.steps for out in there]
    assert [out.stats.accepted for out in outs] == [out.stats.accepted for out in there]


@pytest.mark.parametrize("drafter", ["lookup", "draft_model_self"])
def test_a_stream_that_is_dropped_leaves_its_mate_alone(target: Any, drafter: str) -> None:
    llm = ahead(target, drafter)
    expected = llm.generate([PROMPTS[1]], GREEDY)[0].token_ids
    for steps in range(1, 4):
        dropped, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
        first = next(kept)
        for _ in range(steps):
            next(dropped)
        dropped.close()
        assert llm.engine._in_flight is None  # what was under way had another row in it
        tokens = first.token_ids + [token for piece in kept for token in piece.token_ids]
        assert tokens == expected
    assert not llm.engine.scheduler.running


def test_a_request_may_come_while_a_pass_is_under_way(target: Any) -> None:
    llm = ahead(target, "lookup")
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS[:2]]
    one = llm.stream(PROMPTS[0], GREEDY)
    tokens = next(one).token_ids
    assert llm.engine._in_flight is not None
    assert llm.generate([PROMPTS[1]], GREEDY)[0].token_ids == alone[1]
    tokens += [token for piece in one for token in piece.token_ids]
    assert tokens == alone[0]


def test_a_pass_reads_its_inputs_from_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    for known in ("all", "shape"):
        inputs = NodeInputs(2, 3, torch.device("cpu"), known)  # type: ignore[arg-type]
        inputs.write(tokens, [10, 20], None, 1)
        inputs.fetch()
        assert inputs.real.tolist() == [1]
        assert inputs.lengths.tolist() == [10, 20]
        assert inputs.tokens.tolist() == tokens.tolist()
        assert inputs.depths.tolist() == [[0, 1, 2]] * 2
        assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b111]] * 2
        inputs.write(tokens, [11, 21], [[-1, 0, 0], [-1, 0, 1]], 2)
        assert inputs.lengths.tolist() == [10, 20]  # nothing moves before the pass itself
        inputs.fetch()
        assert inputs.lengths.tolist() == [11, 21]
        assert inputs.depths.tolist() == [[0, 1, 1], [0, 1, 2]]
        assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b101], [0b1, 0b11, 0b111]]


def test_host_memory_goes_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    first, second = (NodeInputs(3, 11, torch.device("cpu"), "all") for _ in range(2))
    place = first._here.data_ptr()
    assert second._here.data_ptr() != place
    del first
    assert NodeInputs(3, 11, torch.device("cpu"), "all")._here.data_ptr() == place


def test_tokens_and_verdict_are_read_together() -> None:
    draft = Draft(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1, 0]] * 2), [2, 2])
    assert draft.read_with(torch.tensor([[7], [8]])) == [[7], [8]]
    assert draft.__dict__["host_tokens"] == [[1, 2], [3, 4]]


# ------------------------------------------------------- trees that nobody has looked at


class Still:
    """A clock on which nothing takes time."""

    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.0, 0.0]


class Unseen(Drafter):
    """Another's trees, handed over as a device would that is still at work. Some rows of some are
    spoilt: tokens, parents and roots that are none."""

    def __init__(self, other: Drafter, *, spoils: bool, device: str = "cpu") -> None:
        self.other, self.spoils, self.steps, self.device = other, spoils, 0, device

    def propose(self, batch: Batch) -> Draft | None:
        draft = self.other.propose(batch)
        if draft is None or max(draft.num_nodes) == 1:
            return None
        self.steps += 1
        sure = torch.full_like(draft.tokens, CONFIDENCE_SCALE)
        trees = torch.stack([draft.tokens, draft.parents, sure], 1).clone()
        if self.spoils:
            row, kind = self.steps % len(trees), self.steps % 5
            spoilt = [(0, 1, 10**9), (0, 0, 77), (1, -1, 50), (1, 1, -1), (2, 1, -(10**12))]
            part, node, value = spoilt[kind]
            trees[row, part, node] = value
        return Draft.from_device(DeviceDraft(batch.roots, trees.to(self.device), Still()))


def planted(tokens: torch.Tensor, ahead: DeviceTree) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel `plant` makes of them: something that can be scored, whatever it is."""
    tokens = tokens.clamp(0, zoo.VOCABULARY - 1)
    tokens[:, 0] = torch.tensor(ahead.roots)
    nodes = torch.arange(tokens.shape[1])
    return tokens, ahead.trees[:, 1].clamp(min=0).minimum(nodes - 1)


@pytest.fixture
def scores_device_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that does it as a GPU would."""
    run = ModelRunner.run

    def unseen(self: ModelRunner, tokens: Any, *, parents: Any = None, **options: Any) -> Any:
        if isinstance(parents, DeviceTree):
            tokens, parents = planted(tokens, parents)
        return run(self, tokens, parents=parents, **options)

    monkeypatch.setattr(ModelRunner, "forward", unseen)
    monkeypatch.setattr(ModelRunner, "scores_device_drafts", lambda *_: True)


@pytest.mark.parametrize("spoils", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.usefixtures("scores_device_drafts", "generous_policy")
def test_trees_nobody_has_looked_at_change_no_text(
    target: Any, sampling: SamplingParams, spoils: bool
) -> None:
    plain = LLM(target, "none", max_batch=4).generate(PROMPTS, sampling)
    answers = {tuple(p): out.token_ids for p, out in zip(PROMPTS, plain, strict=True)}
    for other in (Clairvoyant(answers), ALL["garbage_tree"](target)):
        drafter = Unseen(other, spoils=spoils)
        llm = LLM(target, drafter, max_batch=4)
        llm.engine._ahead = True
        outs = llm.generate(PROMPTS, sampling)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        assert drafter.steps
        texts = [prompt + out.token_ids for prompt, out in zip(PROMPTS, outs, strict=True)]
        for held in llm.engine.verifier.runner.cache.tokens_in:  # what it may be reused for
            assert any(text[: len(held)] == held for text in texts)
        if isinstance(other, Clairvoyant) and not spoils:
            assert sum(out.stats.accepted for out in outs) > sum(out.stats.steps for out in outs)


def test_where_nothing_reads_ahead_they_are_looked_at(target: Any) -> None:
    plain = LLM(target, "none", max_batch=4).generate(PROMPTS, GREEDY)
    answers = {tuple(p): out.token_ids for p, out in zip(PROMPTS, plain, strict=True)}
    llm = LLM(target, Unseen(Clairvoyant(answers), spoils=False), max_batch=4)
    outs = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outs) > 0


@pytest.mark.usefixtures("scores_device_drafts")
def test_only_trees_on_the_batchs_roots_are_read_ahead(target: Any) -> None:
    llm = LLM(target, "none", max_batch=2)
    for prompt in PROMPTS[:2]:
        llm.engine.add(llm._request(prompt, GREEDY))
    llm.engine._admit()
    batch = llm.engine._batch()
    for roots, nodes, reads in ((batch.roots, 4, True), ([1, 2], 4, False), (batch.roots, 65, 0)):
        trees = torch.zeros(2, 3, nodes, dtype=torch.int64)
        draft = Draft.from_device(DeviceDraft(roots, trees, Still()))
        assert llm.engine.verifier.scores_device_drafts(draft, batch) == reads
    assert not llm.engine.verifier.scores_device_drafts(Draft.root_only(batch.roots), batch)


def test_a_row_that_is_no_tree_counts_as_its_root() -> None:
    tokens, parents = [[5, 6, 7], [8, 9, 1]], [[-1, 0, 1], [-1, 0, 2]]
    confidence = [
        [CONFIDENCE_SCALE, CONFIDENCE_SCALE // 2, CONFIDENCE_SCALE],
        [CONFIDENCE_SCALE, 0, 0],
    ]
    trees = torch.tensor([tokens, parents, confidence]).transpose(0, 1)
    draft = Draft.from_device(DeviceDraft([5, 8], trees, Still()))
    assert draft.read_with(torch.tensor([[3], [4]])) == [[3], [4]]
    assert draft.num_nodes == [3, 1]
    assert draft.tokens == [[5, 6, 7], [8, 8, 8]] and draft.parents == [
        [-1, 0, 1],
        [-1, 0, 0],
    ]
    assert draft.confidence == [[0.5, 0.5], []]  # none above its parent's


def test_what_is_kept_moves_when_somebody_looks() -> None:
    """Where that has a quicker way: until then it is known where it lies, and nobody else sees."""
    shapes, here = [LayerKVShape(1, 2, 1, 2)] * 2, torch.device("cpu")
    caches = [KVCache(shapes, 2, 16, torch.float32, here) for _ in range(2)]
    moves: list[Any] = []
    caches[1].mover = lambda slots: bool(moves.append(slots))
    for cache in caches:
        for number, stored in enumerate(cache.tensors()):
            stored.copy_(torch.arange(stored.numel()).view(stored.shape) + 1000 * number)
        cache.tokens_in = [[1, 2, 3], [4]]
        cache.commit([[0, 2, 5], [0, 1]], [[5, 6, 7], [8, 9]])
    assert not moves
    lazy = caches[1]
    assert [lazy.physical_entry(0, slot) for slot in range(7)] == [0, 1, 2, 3, 5, 8, 6]
    assert [lazy.physical_entry(1, slot) for slot in range(4)] == [0, 1, 2, 3]
    assert [caches[0].physical_entry(0, slot) for slot in range(7)] == list(range(7))
    lazy.keep([[0, 3], [0, 2]], [[5, 6], [8, 9]])  # the first are moved before the next are known
    assert moves == [[(0, 4, 5), (0, 5, 8)]]
    caches[0].keep([[0, 3], [0, 2]], [[5, 6], [8, 9]])
    for one, other in zip(caches[0].stored(), lazy.stored(), strict=True):
        assert torch.equal(one, other)
    assert moves[1:] == [[(0, 7, 9), (1, 4, 5)]]
    assert lazy.physical_entry(0, 7) == 7


def test_keys_that_were_being_moved_when_it_stopped_are_not_believed(target: Any) -> None:
    """Neither by the next text with that beginning, nor by the one that goes on."""
    llm = ahead(target, "none")
    engine, cache = llm.engine, llm.engine.verifier.runner.cache
    plain = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    sequence = engine.add(llm._request(PROMPTS[0], GREEDY))[0]
    for _ in range(3):
        engine.step()
    engine._flight = None

    def interrupted(slots: Any) -> bool:
        raise KeyboardInterrupt

    last = len(cache.tokens_in[0]) - 1
    cache.compactor, cache._unmoved = interrupted, {(0, last - 1): last}
    with pytest.raises(KeyboardInterrupt):
        cache.flush()
    assert len(cache.tokens_in[0]) == last - 1
    cache.compactor = None
    for stored in cache.tensors():
        stored[:, 0, :, last - 1 :] = 7.0
    while sequence.finish_reason is None:
        engine.step()
    assert list(sequence.output) == plain


def test_padding_that_a_pass_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded up where the decoder takes it, as it is where it takes only that."""
    passes = ModelRunner(wide(), max_batch=1, max_context=90, scratch_entries=64)
    decoder = passes._decoder
    if decoder is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(Padding, "of", lambda *_, **__: Padding(0, 3))
    for most in (8, 6, 4):
        seen: list[int] = []
        monkeypatch.setattr(decoder, "takes", lambda _, nodes, __, most=most: nodes <= most)
        run = type(decoder).run

        def noted(tokens: Any, *args: Any, seen: Any = seen, run: Any = run, **options: Any) -> Any:
            seen.append(tokens.shape[1])
            return run(decoder, tokens, *args, **options)

        monkeypatch.setattr(decoder, "run", noted)
        assert passes.forward(torch.tensor([[1, 2, 3, 4, 5]])).shape[1] == 5
        assert seen == {8: [8], 6: [5], 4: []}[most]


class Moody(Clairvoyant):
    """Right about everything, and in no mood to be asked about itself."""

    adaptive = True

    @property
    def expected_offer(self) -> Any:
        raise RuntimeError("none")

    def idle_work(self) -> None:
        raise RuntimeError("no time")


@pytest.mark.usefixtures("generous_policy")
def test_what_a_drafter_says_of_itself_costs_nobody_the_text(target: Any) -> None:
    plain = LLM(target, "none", max_batch=2).generate(PROMPTS, GREEDY)
    answers = {tuple(p): out.token_ids for p, out in zip(PROMPTS, plain, strict=True)}
    llm = LLM(target, Moody(answers), max_batch=2)
    llm.engine._ahead = True
    with pytest.warns(DrafterFaultWarning, match="Moody failed and is left out where it does"):
        outs = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outs) > 10  # it is asked all the same
