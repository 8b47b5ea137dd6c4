"""What a verifier asks of its runner: sizes of forwards, repairs, the self-test, timing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from draftahead import Batch, Draft, SamplingParams
from draftahead.core.draft import DeviceDraft
from draftahead.core.stats import CompileTime
from draftahead.core.tree import MAX_NODES
from draftahead.core.types import ForwardOutput, SequenceState
from draftahead.errors import ReplayUnsupportedError
from draftahead.models import verifier as verifiers
from draftahead.models.runner import ModelRunner
from draftahead.models.verifier import Verifier
from llama_shaped import llama_shaped, needs_kernels
from toy import World


def sequence(length: int, *, new: int = 5, generated: int = 0, id: int = 0) -> SequenceState:
    """With `length` tokens, the last `generated` of them output."""
    prompt = tuple((7 * i + 3 * id) % 50 for i in range(length - generated))
    state = World(0, SamplingParams(max_tokens=new), prompt).sequence()
    state = dataclasses.replace(state, id=id)
    state.tokens.extend(range(generated))
    return state


def batch_of(*sequences: SequenceState) -> Batch:
    return Batch(sequences, (9,) * len(sequences))


def verifier_of(name: str = "llama", **options: Any) -> Verifier:
    """`name`: of the zoo, or "kernels"."""
    model = llama_shaped("llama") if name == "kernels" else zoo.tiny(name)
    defaults = {"max_batch": 2, "max_context": None, "exact": "distribution", "compiled": False}
    return Verifier(model, **(defaults | options))


@dataclasses.dataclass
class Call:
    tokens: torch.Tensor
    options: dict[str, Any]
    held: list[int]  # what slot 0 holds
    logits: torch.Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every forward of every runner."""
    found: list[Call] = []
    forward = ModelRunner.forward

    def noted(self: ModelRunner, tokens: torch.Tensor, **options: Any) -> ForwardOutput:
        held = list(self.cache.tokens_in[options.get("first_slot", 0)])
        output = forward(self, tokens, **options)
        found.append(Call(tokens, options, held, output.logits.clone()))
        return output

    monkeypatch.setattr(ModelRunner, "forward", noted)
    return found


# ------------------------------------------------------------------------------------- depths


def test_a_draft_stays_within_the_context_and_within_one_forward() -> None:
    verifier = verifier_of(max_context=100)
    depths = [verifier.max_depth(sequence(n)) for n in (2, 36, 37, 60, 99, 100)]
    assert depths == [63, 63, 63, 40, 1, 0]
    replay = verifier_of(max_context=100, exact="replay")
    assert [replay.max_depth(sequence(n)) for n in (2, 92, 93, 94, 100)] == [7, 7, 7, 6, 0]


def test_a_draft_does_not_cross_the_threshold_of_longrope() -> None:
    verifier = verifier_of("phi3_longrope", max_context=100)
    assert verifier.runner.long_rope_threshold == 24
    assert [verifier.max_depth(sequence(n)) for n in (4, 20, 23, 24, 25, 80)] == [
        20, 4, 1, 0, 63, 20,
    ]  # fmt: skip


def test_scratch_entries_are_behind_the_context() -> None:
    for exact, entries in (("distribution", 64), ("replay", 128)):
        assert verifier_of(max_context=70, exact=exact).cache.num_entries == 70 + entries


@needs_kernels
def test_forwards_are_of_one_shape_only_where_bits_depend_on_it() -> None:
    for exact in ("distribution", "replay"):
        verifier = verifier_of("kernels", exact=exact)
        assert not verifier.fixed_shape
        assert verifier.max_nodes == 64
    assert verifier_of(exact="replay").fixed_shape
    assert not verifier_of().fixed_shape


# ------------------------------------------------------------------------------------ prompts


def test_a_prompt_is_filled_but_for_its_last_token() -> None:
    for exact in ("distribution", "replay"):
        verifier, one, other = verifier_of(exact=exact), sequence(9, id=1), sequence(5, id=2)
        assert verifier.prefill(0, one) == 0
        assert verifier.cache.tokens_in[0] == one.tokens[:-1]
        verifier.cache.tokens_in[0][:] = [44] * 4
        verifier.prefill_slots(0, [one, other])
        assert verifier.cache.tokens_in == [one.tokens[:-1], other.tokens[:-1]]


@needs_kernels
def test_several_prompts_reuse_nothing_in_replay_either(calls: list[Call]) -> None:
    """Their slots are the caller's to fill: what they held counts for nothing."""
    verifier = verifier_of("kernels", exact="replay")
    sequences = [sequence(9, id=1), sequence(5, id=2)]
    verifier.prefill_slots(0, sequences)
    calls.clear()
    verifier.prefill_slots(0, sequences)
    assert [call.tokens.numel() for call in calls] == [8, 4]


def test_several_prompts_are_filled_in_one_forward(calls: list[Call]) -> None:
    verifier = verifier_of()
    verifier.prefill_slots(0, [sequence(9, id=1), sequence(5, id=2)])
    assert [tuple(call.tokens.shape) for call in calls] == [(2, 8)]


# ------------------------------------------------------------------------------------- drafts


def test_a_chain_needs_no_parents_and_a_tree_does(calls: list[Call]) -> None:
    verifier, one = verifier_of(), sequence(5)
    (root,) = batch_of(one).roots
    device_chain = DeviceDraft([root], torch.tensor([[root, 1, 2]]), [3])
    for draft in (Draft.chains([root], [[1, 2]]), device_chain):
        verifier.forward(batch_of(one), draft)
        assert calls[-1].options["parents"] is None
        assert calls[-1].tokens.tolist() == [[root, 1, 2]]
    verifier.forward(batch_of(one), Draft.trees([root], [[(1, 0), (2, 0)]]))
    assert calls[-1].options["parents"].tolist() == [[-1, 0, 0]]


@pytest.mark.parametrize("timed", [True, False])
def test_the_verification_of_a_device_draft_is_timed(timed: bool, calls: list[Call]) -> None:
    verifier, one, marks = verifier_of(), sequence(5), list[int]()
    trees = torch.tensor([[[one.tokens[-1], 1, 2], [-1, 0, 0], [0, 0, 0]]])
    timer: Any = SimpleNamespace(mark=lambda: marks.append(len(calls)))
    draft = DeviceDraft.of_trees(batch_of(one).roots, trees, timer)
    draft = draft if timed else dataclasses.replace(draft, timer=None)
    found = verifier.forward(batch_of(one), draft)
    assert torch.equal(found.logits, calls[-1].logits)
    assert calls[-1].options["parents"].roots == batch_of(one).roots
    assert calls[-1].options["parents"].trees is trees
    assert marks == ([len(calls)] if timed else [])


def test_logits_of_one_sequence_outlive_the_forward_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may reuse their memory."""
    verifier, memory = verifier_of("phi3_longrope"), torch.zeros(1, 1, 3)
    sequences = [sequence(30, id=1), sequence(9, id=2)]
    verifier.prefill_slots(0, sequences)

    def forward(tokens: torch.Tensor, *, first_slot: int, **_: Any) -> ForwardOutput:
        return ForwardOutput(memory.fill_(first_slot + 1.0))

    monkeypatch.setattr(verifier.runner, "forward", forward)
    batch = batch_of(*sequences)
    found = verifier.forward(batch, Draft.root_only(batch.roots)).logits
    assert found[:, 0, 0].tolist() == [1.0, 2.0]


# ------------------------------------------------------------------------------------- repair


def test_a_slot_that_holds_what_its_sequence_needs_is_left_alone(calls: list[Call]) -> None:
    verifier = verifier_of()
    one, other = sequence(9, id=1), sequence(30, id=2)
    verifier.prefill_slots(0, [one, other])
    calls.clear()
    for _ in range(2):
        verifier.forward(batch_of(one, other), Draft.root_only([one.tokens[-1], other.tokens[-1]]))
    assert [tuple(call.tokens.shape) for call in calls] == [(2, 1)] * 2


def test_what_slots_lack_or_hold_wrongly_is_computed_before_a_forward(calls: list[Call]) -> None:
    verifier = verifier_of()
    batch = [sequence(9, id=1), sequence(12, id=2)]
    held = verifier.cache.tokens_in

    def sizes() -> list[int]:
        calls.clear()
        verifier.forward(batch_of(*batch), Draft.root_only([one.tokens[-1] for one in batch]))
        assert held == [one.tokens[:-1] for one in batch]
        return [call.tokens.shape[1] for call in calls]

    assert sizes() == [8, 11, 1]
    held[0].append(33)  # an entry of a token that was never emitted
    assert sizes() == [1]
    del held[1][7:]  # entries are lost
    assert sizes() == [4, 1]
    batch.reverse()  # slots hold other sequences' entries
    assert sizes() == [11, 8, 1]
    held.reverse()
    batch.reverse()  # an interrupted move of slots: these entries are right
    assert sizes() == [1]


def test_a_sequence_that_outgrows_longrope_is_computed_anew_once(calls: list[Call]) -> None:
    verifier = verifier_of("phi3_longrope", max_batch=1)
    for length, computed in ((24, [23, 1]), (25, [24, 1]), (26, [1, 1]), (26, [1])):
        one = sequence(26, id=1)
        del one.tokens[length:]
        calls.clear()
        verifier.forward(batch_of(one), Draft.root_only([one.tokens[-1]]))
        assert [call.tokens.shape[1] for call in calls] == computed
        assert verifier.cache.long_rope == [length > 24]


def test_logits_of_sequences_on_both_sides_of_longropes_threshold() -> None:
    """Each forward is its own: trees and tokens are those of its sequence."""
    verifier = verifier_of("phi3_longrope", max_batch=3)
    sequences = [sequence(20, id=1), sequence(30, id=2), sequence(10, id=3)]
    trees = [[(5, 0), (6, 0), (7, 1)], [(8, 0), (9, 1)], [(3, 0), (2, 0)]]
    roots = [one.tokens[-1] for one in sequences]
    together = verifier.forward(batch_of(*sequences), Draft.trees(roots, trees)).logits
    alone = verifier_of("phi3_longrope", max_batch=1)
    for b, one in enumerate(sequences):
        draft = Draft.trees(roots[b : b + 1], trees[b : b + 1])
        expected = alone.forward(batch_of(one), draft).logits[0]
        torch.testing.assert_close(together[b, : draft.width], expected)
    assert together.shape[:2] == (3, 4)


def test_sequences_with_the_same_frequencies_take_one_forward(calls: list[Call]) -> None:
    verifier = verifier_of("phi3_longrope")
    for lengths, forwards in (((20, 9), 1), ((30, 40), 1), ((30, 9), 2)):
        sequences = [sequence(n, id=n) for n in lengths]
        verifier.prefill_slots(0, sequences)
        calls.clear()
        verifier.forward(batch_of(*sequences), Draft.root_only([1, 2]))
        assert len(calls) == forwards


def test_a_fixed_shape_forward_is_cut_to_the_draft_and_padded_by_zeros(calls: list[Call]) -> None:
    verifier = verifier_of(exact="replay")
    one, other = sequence(9, id=1), sequence(12, id=2)
    verifier.prefill_slots(0, [one, other])
    calls.clear()
    roots = [one.tokens[-1], other.tokens[-1]]
    draft = Draft.chains(roots, [[4, 5], [6]])
    logits = verifier.forward(batch_of(one, other), draft).logits
    assert [call.tokens.tolist() for call in calls] == [
        [[roots[0], 4, 5, 0, 0, 0, 0, 0]],
        [[roots[1], 6, roots[1], 0, 0, 0, 0, 0]],
    ]
    assert logits.shape[:2] == (2, 3)
    assert all(torch.equal(logits[b], call.logits[0, :3]) for b, call in enumerate(calls))


# ------------------------------------------------------------------------------------- replay


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay in a context of 128, with powers of two that it can hold."""
    monkeypatch.setattr(verifiers, "REPLAY_KV_LEN", 16)
    monkeypatch.setattr(verifiers, "REPLAY_CHUNK", 8)


@pytest.mark.usefixtures("lengths")
def test_a_request_reads_the_same_kv_entries_from_begin_to_end(calls: list[Call]) -> None:
    """As many as its prompt, its longest output and a chunk of padding need."""
    verifier = verifier_of(exact="replay")
    for length, new, generated, expected in (
        (4, 4, 0, 16),
        (4, 5, 0, 32),
        (12, 4, 8, 16),
        (20, 4, 0, 32),
        (4, 20, 0, 32),
        (20, 5, 0, 64),
        (100, 20, 0, 128),
        (100, 21, 0, 136),  # what the cache has
    ):
        calls.clear()
        one = sequence(length, new=new, generated=generated, id=length + new)
        verifier.forward(batch_of(one), Draft.root_only([one.tokens[-1]]))
        assert calls[-1].options["kv_len"] == expected


@pytest.mark.usefixtures("lengths")
def test_without_a_longest_output_the_prompt_alone_counts(calls: list[Call]) -> None:
    verifier, one = verifier_of(exact="replay"), sequence(8)
    one.params = SamplingParams(max_tokens=None)
    verifier.forward(batch_of(one), Draft.root_only([one.tokens[-1]]))
    assert calls[-1].options["kv_len"] == 16


def nodes_and_roots(calls: list[Call]) -> tuple[Call, list[Call]]:
    checked = [call for call in calls if call.options.get("with_logits", True)]
    return checked[0], checked[1:]


@pytest.mark.usefixtures("lengths")
def test_the_self_test_compares_every_node_of_a_chain_with_a_root(calls: list[Call]) -> None:
    """Once for each number of KV entries, behind a prompt of half of them."""
    verifier = verifier_of(exact="replay", max_batch=2)
    for kv_len, start in ((16, 8), (64, 32), (136, 68)):
        if kv_len != 16:
            calls.clear()
            verifier._self_test(1, kv_len)
        chain, roots = nodes_and_roots(calls)
        assert len(chain.held) == start
        tokens = chain.tokens[0].tolist()
        assert len(tokens) == len(roots) == 8
        prompt = [call for call in calls if not call.options.get("with_logits", True)]
        assert prompt and all(call.tokens.shape == (1, 8) for call in prompt)
        for index, root in enumerate(roots):
            assert root.tokens.shape == (1, 8)
            assert root.tokens[0, 0] == tokens[index]
            assert root.held == chain.held + tokens[:index]
        assert {call.options["kv_len"] for call in calls} == {kv_len}
        assert {call.options.get("first_slot", 0) for call in calls} == {int(kv_len != 16)}
        assert verifier.cache.tokens_in == [[], []]
        calls.clear()
        verifier._self_test(1, kv_len)
        assert not calls


def test_the_self_test_fits_a_short_context(calls: list[Call]) -> None:
    verifier_of(exact="replay", max_context=30)
    assert len(nodes_and_roots(calls)[0].held) == 22
    calls.clear()
    verifier_of(exact="replay", max_context=5)
    assert nodes_and_roots(calls)[0].held == []


@needs_kernels
def test_kernels_are_tested_with_the_shapes_that_they_run(calls: list[Call]) -> None:
    verifier_of("kernels", exact="replay", max_context=30)
    replayed = calls[-10:]
    assert [call.tokens.shape[1] for call in replayed] == [22, 8] + [1] * 8
    assert all(call.options["kv_len"] is None for call in replayed)


def test_the_self_test_keeps_logits_that_the_next_forward_overwrites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch.zeros(1, 128, zoo.VOCABULARY)
    verifier = verifier_of()

    def forward(tokens: torch.Tensor, **_: Any) -> ForwardOutput:
        memory.add_(1.0)
        return ForwardOutput(memory[:, : tokens.shape[1]])

    monkeypatch.setattr(verifier.runner, "forward", forward)
    with pytest.raises(ReplayUnsupportedError):
        verifier._self_test(0, 128)


def test_a_self_test_says_how_far_a_logit_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, moves = ModelRunner.forward, list[int]()

    def moved(self: ModelRunner, tokens: torch.Tensor, **options: Any) -> ForwardOutput:
        logits = forward(self, tokens, **options).logits.clone()
        if logits.shape[1] == 8 and not moves:
            moves.append(0)
            logits[:, 5, 2] -= 0.25
            logits[:, 5, 3] += 0.5
        return ForwardOutput(logits)

    monkeypatch.setattr(ModelRunner, "forward", moved)
    with pytest.raises(ReplayUnsupportedError, match=r"logits change by 5\.0e-01 with its place"):
        verifier_of(exact="replay")


def test_a_new_length_is_tested_before_its_prompt_is_filled(
    lengths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, tested = verifier_of(exact="replay"), list[int]()
    monkeypatch.setattr(verifier, "_self_test", lambda slot, kv_len: tested.append(kv_len))
    verifier.prefill(0, sequence(30))
    assert tested == [64]
    plain = verifier_of()
    monkeypatch.setattr(plain, "_self_test", lambda slot, kv_len: tested.append(kv_len))
    plain.prefill(0, sequence(30))
    assert tested == [64]


# ------------------------------------------------------------------------------------- timing


def test_a_timed_forward_reads_entries_that_were_written(calls: list[Call]) -> None:
    verifier = verifier_of()
    stored = verifier.cache.tensors()
    steps = ((1, 1), (10, 10), (6, 0), (10, 10), (10, 0), (0, 0), (6, 6), (20, 20))
    for kv_len, written in steps:  # what a step erases behind its entries is not written any more
        for tensor in stored:
            tensor.fill_(1.0)
        calls.clear()
        assert verifier.timed_forward(3, kv_len) > 0
        (call,) = calls
        assert call.tokens.shape == (1, 3)
        assert call.held == [0] * kv_len
        assert verifier.cache.tokens_in == [[], []]
        for tensor in stored:
            assert (tensor[:, 0, :, :written] == 0).all()
            assert (tensor[:, 0, :, written:kv_len] == 1).all()
            behind = tensor[:, 0, :, kv_len:]  # nothing of the forward stays: it may not be finite
            assert (behind[:, :, : 3 + MAX_NODES] == 0).all()
            assert (behind[:, :, 3 + MAX_NODES :] == 1).all()
            assert (tensor[:, 1] == 1).all()


def test_a_timed_forward_waits_for_the_device_and_leaves_out_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier, now = verifier_of(), [100.0]
    monkeypatch.setattr(verifiers.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(CompileTime, "seconds", 7.0)
    pending = [50.0]  # of work launched before

    def synchronize() -> None:
        now[0] += pending[0]
        pending[0] = 0.0

    def forward(nodes: torch.Tensor) -> None:
        now[0] += 1.0  # to launch it, and to compile
        CompileTime.seconds += 0.75
        pending[0] += 2.0

    monkeypatch.setattr(verifier.runner, "synchronize", synchronize)
    monkeypatch.setattr(verifier.runner, "forward", forward)
    assert verifier.timed_forward(1, 4) == 2.25
