"""From logits to a token at the edges: ties at a cut, rows of different settings, processors
along a path, the numbers of the noise themselves, and what a drafter may draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import SequenceState
from draftahead.errors import ProcessorError
from draftahead.sampling import processors
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext, RngStream, rng_key
from draftahead.sampling.processors import probs_of, processed
from toy import END, VOCABULARY, World

INF, NAN = float("inf"), float("nan")
KEY_1_2_3 = 2869315087210772132
UNIFORMS = [
    [0.8948145419814352, 0.45769561165979733, 0.4608060643011477],
    [0.7138577247376193, 0.3867680459839341, 0.752307015838224],
]
BASE: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sequence(**fields: Any) -> SequenceState:
    return World(0, SamplingParams(**(BASE | fields))).sequence()


def context(*path: int, **fields: Any) -> NodeContext:
    return NodeContext(sequence(**fields), path)


def probs(values: list[float], **fields: Any) -> list[float]:
    """The distribution that is drawn from, of logits that are the logarithms of these."""
    logits = torch.tensor([values], dtype=torch.float64).log()
    found: list[float] = probs_of(logits, [context(**fields)])[0].tolist()
    return found


def by_hand(logits: Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, one after the other, in Python's own numbers."""
    warm = [x / (params.temperature or 1) for x in logits.double().tolist()]
    law = [math.exp(x - max(warm)) for x in warm]

    def only(lowest: float) -> list[float]:
        left = [x if x >= lowest else 0.0 for x in law]
        return [x / sum(left) for x in left]

    law = only(0.0)
    if params.top_k:
        law = only(sorted(law, reverse=True)[: params.top_k][-1])
    if params.top_p not in (None, 1.0):
        mass, lowest = 0.0, 2.0
        for x in sorted(law, reverse=True):
            if mass < params.top_p:
                lowest = x
            mass += x
        law = only(lowest)
    if params.min_p:
        law = only(params.min_p * max(law))
    return law


# ------------------------------------------------------------------------ ties at the cuts


@pytest.mark.parametrize(
    ("top_p", "left"),
    [
        (0.5, [1, 0, 0]),  # the first one alone has it
        (0.5000001, [0.5, 0.25, 0.25]),  # equals at the cut stay together
        (0.75, [0.5, 0.25, 0.25]),
        (0.4, [1, 0, 0]),
        (1e-9, [1, 0, 0]),  # one token always stays
    ],
)
def test_top_p_at_an_exact_tie(top_p: float, left: list[float]) -> None:
    """[.5, .25, .25] at .5: a token stays if the mass before it is below top-p, not if equal."""
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2)]], dtype=torch.float64)
    assert probs_of(logits, [context()])[0].tolist() == [0.5, 0.25, 0.25]  # exactly
    assert probs_of(logits, [context(top_p=top_p)])[0].tolist() == left


def test_top_k_keeps_equals_at_the_cut_and_may_exceed_the_vocabulary() -> None:
    assert probs([0.4, 0.2, 0.2, 0.2], top_k=1) == pytest.approx([1, 0, 0, 0])
    assert probs([0.4, 0.2, 0.2, 0.2], top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert probs([0.4, 0.3, 0.2, 0.1], top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probs([0.4, 0.3, 0.2, 0.1], top_k=3) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert probs([0.4, 0.3, 0.2, 0.1], top_k=99) == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_min_p_is_a_share_of_the_likeliest_and_keeps_what_equals_it() -> None:
    assert probs([0.5, 0.25, 0.125, 0.125], min_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probs([0.5, 0.25, 0.125, 0.125], min_p=0.51) == pytest.approx([1, 0, 0, 0])
    assert probs([0.5, 0.25, 0.125, 0.125], min_p=1.0) == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_different_settings_are_each_cut_by_their_own(seed: int) -> None:
    """Also where only some rows are cut at all, and where a greedy row stands among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(8, 30, generator=generator, dtype=torch.float64)
    fields: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_k": 7, "top_p": 0.6},
        {"top_p": 0.3, "temperature": 0.5},
        {"min_p": 0.1},
        {"min_p": 0.3, "top_k": 1},
        {"temperature": 2.5},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
    ]
    for group in (fields, fields[:2], fields[3:5], fields[6:], fields[::-1], fields[:1]):
        rows = [context(**one) for one in group]
        found = probs_of(logits[: len(group)], rows)
        for row, (at, law) in enumerate(zip(rows, found, strict=True)):
            expected = torch.tensor(by_hand(logits[row], at.sequence.params))
            if at.sequence.params.greedy:
                expected = torch.zeros(30).index_fill(0, logits[row].argmax(), 1.0)
            assert torch.allclose(law, expected.double(), atol=1e-12)
    # A row that asks for no cut keeps its bits beside those that do.
    alone = probs_of(logits[:1], [context()])
    for other in fields[1:6]:
        assert torch.equal(probs_of(logits[:2], [context(), context(**other)])[:1], alone)


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.97])
def test_a_nucleus_wider_than_the_first_look(top_p: float) -> None:
    """1,024 tokens are sorted first, and all of them where these are not enough: for one row of
    several, or because the mass is reached with the very last of them."""
    generator = torch.Generator().manual_seed(3)
    flat = 0.1 * torch.randn(1, 3000, generator=generator, dtype=torch.float64)
    sharp = 5 * torch.randn(1, 3000, generator=generator, dtype=torch.float64)
    both = torch.cat([sharp, flat, sharp])
    rows = [context(top_p=top_p), context(top_p=top_p), context()]
    found = probs_of(both, rows)
    for law, logits, at in zip(found, both, rows, strict=True):
        expected = torch.tensor(by_hand(logits, at.sequence.params), dtype=torch.float64)
        assert torch.allclose(law, expected, atol=1e-12)


@pytest.mark.parametrize("size", [1023, 1024, 1025])
def test_a_nucleus_as_wide_as_the_first_look(size: int) -> None:
    """All tokens alike: equals stay together, so all of them do."""
    law = probs_of(torch.zeros(1, size, dtype=torch.float64), [context(top_p=0.5)])
    assert torch.allclose(law, torch.full_like(law, 1 / size))


# -------------------------------------------------------------- logits that are not finite


def test_a_row_without_a_distribution_is_no_affair_of_its_mates() -> None:
    logits = torch.tensor([[0.0, NAN, 0.0], [INF, 0.0, 0.0], [-INF] * 3, [0.0, -INF, 0.0]])
    for fields in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        rows = [context(**fields) for _ in range(4)]
        law = probs_of(logits, rows)
        assert law[:3].isnan().all()
        assert law[3].tolist() == ([1, 0, 0] if "temperature" in fields else [0.5, 0, 0.5])
        for apart in (True, False):
            tokens, finite = processors.draw(logits, rows, apart=apart)
            assert finite.tolist() == [False, False, False, True]
            assert int(tokens[3]) in (0, 2)
            assert tokens.shape == (4,)


def test_half_precision_is_computed_in_single_and_double_stays_double() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for dtype, expected in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        law = probs_of(logits.to(dtype), [context()])
        assert law.dtype == expected
        assert torch.equal(law, logits.to(dtype).to(expected).softmax(-1))
        assert processed(logits.to(dtype), [context(logit_bias={1: 1.0})]).dtype == expected


# ---------------------------------------------------------------- processors along a path


def row(*path: int, after: tuple[int, ...] = (), **fields: Any) -> list[float]:
    """Logits of zero, 1, 2 and -3 after the processors, behind `after` and a path."""
    at = context(*path, **fields)
    at.sequence.tokens += after
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    before = logits.clone()
    found: list[float] = processed(logits, [at])[0].tolist()
    assert torch.equal(logits, before)  # what was given is not written to
    return found


def test_processors_in_the_order_of_transformers() -> None:
    """Bias, repetition, presence and frequency, bans, the end, then the user's."""
    assert row(logit_bias={0: 5.0, 2: -1.0}) == [5, 1, 1, -3]
    assert row(logit_bias={0: 5.0}, repetition_penalty=2.0) == [2.5, 0.5, 2, -3]
    assert row(3, repetition_penalty=2.0) == [0, 0.5, 2, -6]
    assert row(2, repetition_penalty=0.5) == [0, 2, 4, -3]
    assert row(presence_penalty=0.5) == [0, 1, 2, -3]  # the prompt does not count
    assert row(2, 2, presence_penalty=0.5) == [0, 1, 1.5, -3]
    assert row(2, 2, frequency_penalty=0.5) == [0, 1, 1, -3]
    assert row(2, after=(0, 2), frequency_penalty=0.5) == [-0.5, 1, 1, -3]
    assert row(0, 2, frequency_penalty=0.5, presence_penalty=1.0) == [-1.5, 1, 0.5, -3]
    assert row(2, repetition_penalty=2.0, presence_penalty=1.0) == [0, 0.5, 0, -3]
    assert row(2, presence_penalty=-1.0) == [0, 1, 3, -3]


def test_bad_words_look_back_along_the_path() -> None:
    def banned(words: list[tuple[int, ...]], *path: int, after: tuple[int, ...] = ()) -> list[int]:
        at = context(*path, bad_words=words)
        at.sequence.tokens += after
        at.sequence.request.__dict__["bad_word_ids"] = tuple(words)
        found = processed(torch.zeros(1, 4), [at])[0]
        return found.isneginf().nonzero()[:, 0].tolist()

    assert banned([(2,)]) == [2]
    assert banned([(2, 3)]) == []
    assert banned([(2, 3)], 2) == [3]
    assert banned([(2, 3)], 2, 0) == []
    assert banned([(2, 3)], after=(2,)) == [3]
    assert banned([(1, 2, 0)], 2) == [0]  # begins in the prompt
    assert banned([(0, 2, 0)], 2) == []
    assert banned([(2, 2, 1)], 2, after=(2,)) == [1]
    assert banned([(0, 0, 0, 0, 0, 1)]) == []  # longer than the text
    assert banned([(0, 1, 3), (2,)]) == [2, 3]


def test_the_end_is_banned_below_min_tokens() -> None:
    for least in (1, 2, 3):
        for path in ((), (0,), (0, 1), (0, 1, 2)):
            found = row(*path, min_tokens=least)
            assert found[END] == (-INF if len(path) < least else -3)
            assert found[:END] == [0, 1, 2]
        assert row(2, after=(0,), min_tokens=least)[END] == (-INF if least > 2 else -3)


def test_a_users_processor_sees_the_text_and_the_path_in_its_dtype() -> None:
    seen: list[Any] = []

    def first(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids.tolist(), scores.shape))
        return scores.double() + 1

    def second(ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 2

    assert row(2, 3, after=(1,), processors=[first, second]) == [2, 4, 6, -4]
    assert seen == [([[0, 1, 1, 2, 3]], (1, 4))]


def test_a_processor_that_fails_leaves_a_row_without_a_distribution() -> None:
    def explodes(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("boom")

    def narrow(ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, 1:]

    for processor, said in ((explodes, "RuntimeError: boom"), (narrow, "made [3] out of [4]")):
        rows = [context(), context(processors=[processor])]
        found = processed(torch.zeros(2, 4), rows)
        assert found[0].tolist() == [0] * 4
        assert found[1].isnan().all()
        fault = rows[1].sequence.fault
        assert isinstance(fault, ProcessorError)
        assert said in str(fault)
        assert rows[0].sequence.fault is None


# ------------------------------------------------------------------- the noise, number by number


def test_a_seed_gives_the_same_noise_in_every_version() -> None:
    """Texts of a seed are reproducible: these numbers do not change."""
    assert rng_key() == 0
    assert rng_key(0) == -2152535657050944081
    assert rng_key(1, 2, 3) == KEY_1_2_3
    assert rng_key(3, 2, 1) != KEY_1_2_3
    assert rng_key(-1) == rng_key(2**64 - 1)
    found = noise.uniforms([KEY_1_2_3, 5], 3)
    assert found.dtype == torch.float64
    assert found.tolist() == UNIFORMS
    some = processors.uniforms_at([KEY_1_2_3, 5], torch.tensor([[2, 0], [1, 1]]))
    assert some.tolist() == [[UNIFORMS[0][2], UNIFORMS[0][0]], [UNIFORMS[1][1]] * 2]
    assert (found * 2**53 % 2 == 1).all()  # 52 bits and a half


def test_keys_are_of_sequence_purpose_and_place() -> None:
    at = context(1, 2)
    at.sequence.rng_key = 77
    at.sequence.tokens += [3]
    assert at.position == 5
    assert (int(RngStream.TARGET), int(RngStream.DRAFT), int(RngStream.COIN)) == (0, 1, 2)
    assert processors.target_rng_key(at) == rng_key(77, 0, 5)
    assert processors.step_rng_key(RngStream.COIN, at) == rng_key(77, 2, 3, 2)
    assert processors.step_rng_key(RngStream.DRAFT, at) == rng_key(77, 1, 3, 2)


def test_samples_and_seeds_never_share_their_noise() -> None:
    """Sample 1 of seed 1 is another text than sample 0 of seed 2: a sum would not tell them."""
    keys = {rng_key(seed, sample) for seed in range(40) for sample in range(40)}
    assert len(keys) == 1600


def test_a_race_is_won_by_the_earliest_arrival() -> None:
    for key in range(30):
        law = torch.rand(6, generator=torch.Generator().manual_seed(key))
        noise = noise.uniforms([key], 6)[0].tolist()
        arrivals = [-math.log(u) / p for u, p in zip(noise, law.tolist(), strict=True)]
        found = noise.sample_gumbel(law[None], [key])
        assert found.tolist() == [arrivals.index(min(arrivals))]


# ------------------------------------------------------------------------------ log-probabilities


def test_logprobs_with_penalties_of_every_kind() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -INF]], dtype=torch.float64)

    def told(token: int, **fields: Any) -> Any:
        return processors.token_logprobs(logits, [context(2, **fields)], [token])[0]

    plain = logits[0].log_softmax(-1)
    one = told(0, logprobs=2, temperature=0.0)
    assert one.token_id == 0
    assert one.logprob == pytest.approx(float(plain[0]))
    assert one.top == {1: pytest.approx(float(plain[1])), 0: pytest.approx(float(plain[0]))}
    assert list(told(0, logprobs=99).top) == [1, 0, 2]  # what is impossible is not listed
    assert told(0, logprobs=0).top == {}
    assert told(3, logprobs=1).logprob == -INF
    cut = told(1, logprobs=4, top_k=1)
    assert (cut.logprob, cut.top) == (pytest.approx(0), {1: pytest.approx(0)})
    penalised = told(2, logprobs=1, presence_penalty=1.0, temperature=0.5)
    expected = torch.tensor([2.0, 4.0, -1.0]).log_softmax(-1)
    assert penalised.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    raw = told(2, logprobs=1, presence_penalty=1.0, temperature=0.5, raw_logprobs=True)
    assert raw.logprob == pytest.approx(float(plain[2]), abs=1e-6)
    greedy = told(2, logprobs=1, presence_penalty=1.0, temperature=0.0)
    expected = torch.tensor([1.0, 2.0, -0.5]).log_softmax(-1)
    assert greedy.logprob == pytest.approx(float(expected[2]), abs=1e-6)


# --------------------------------------------------------------------------- what a drafter draws


def test_logits_of_a_drafter_are_fitted_to_the_vocabulary() -> None:
    logits = torch.tensor([[1.0, NAN, INF, -INF]])
    floor = torch.finfo(torch.float32).min / 4
    assert processors._fitted(logits, 4).tolist() == [[1, floor, -floor, floor]]
    assert processors._fitted(logits, 1).tolist() == [[1]]
    assert processors._fitted(logits, 6).tolist() == [[1, floor, -floor, floor, floor, floor]]
    assert processors._fitted(logits.half(), 4).dtype == torch.float32
    assert processors._fitted(logits.double(), 4).dtype == torch.float64
    whole = processors.scatter_to_vocab(torch.tensor([[[1.0, 2.0]]]), torch.tensor([3, 0]), 5)
    assert whole.tolist() == [[[2, -INF, -INF, 1, -INF]]]


def sampler(
    *fields: dict[str, Any], exact: Any = "law", max_depths: list[int] | None = None
) -> Any:
    sequences = [sequence(**one) for one in fields]
    for number, one in enumerate(sequences):
        one.key = rng_key(number)
    return RecordedDraftSampler(sequences, max_depths or [3] * len(fields), VOCABULARY, exact)


def logits_of(rows: int, depth: int, size: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(depth)
    return 2 * torch.randn(rows, size, generator=generator)


def test_drawn_tokens_follow_the_recorded_distributions_and_their_own_keys() -> None:
    penalties = {"presence_penalty": 1.0, "repetition_penalty": 1.5}
    for fields in ([{}, {"temperature": 0.5}], [{}, penalties], [penalties, {"temperature": 0.0}]):
        dice = sampler(*fields)
        for depth in range(3):
            logits = logits_of(2, depth)
            paths = [tuple(chain) for chain in dice.chains]
            drawn = dice.draw(logits)
            rows = [NodeContext(s, path) for s, path in zip(dice.sequences, paths, strict=True)]
            expected = probs_of(logits, rows)
            assert torch.equal(dice.probs[-1], expected)
            keys = [processors.step_rng_key(RngStream.DRAFT, at) for at in rows]
            assert drawn.tolist() == noise.sample_gumbel(expected, keys).tolist()
            assert [chain[-1] for chain in dice.chains] == drawn.tolist()
        draft = dice.draft()
        assert draft.num_nodes == [4, 4]
        assert draft.host_tokens == [[1, *chain] for chain in dice.chains]
        assert draft.host_parents == [[-1, 0, 1, 2]] * 2
        assert torch.equal(draft.probs[:, :3], torch.stack(dice.probs, 1))
        assert not draft.probs[:, 3].any()
        assert dice.draft() is draft


@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 0.5}], ids=["plain", "processors"])
def test_a_chain_ends_at_its_depth_or_where_the_drafter_says(fields: dict[str, Any]) -> None:
    dice = sampler(*[fields] * 4, max_depths=[3, 1, 0, 3])
    assert dice.chains == [[]] * 4
    assert dice.draft() is None
    going = torch.tensor([True, True, True, True])
    lengths = [[1, 1, 0, 1], [1, 1, 0, 1 + 1], [1, 1, 0, 3]]
    for depth in range(3):
        if depth:
            going[0] = depth == 2  # row 0 ends after one; that it goes on later changes nothing
        dice.draw(logits_of(4, depth), going)
        assert [len(chain) for chain in dice.chains] == lengths[depth]
        before = [list(chain) for chain in dice.chains]
        draft = dice.draft()
        assert draft.num_nodes == [1 + n for n in lengths[depth]]
        assert draft.tokens.shape == (4, 2 + depth)
        assert dice.chains == before  # by the draft now
    dice.draw(logits_of(4, 3))
    assert [len(chain) for chain in dice.chains] == [1, 1, 0, 3]
    assert dice.draft().tokens.shape == (4, 4)  # as wide as the longest, and no wider


def test_a_row_without_a_distribution_ends_its_chain_alone() -> None:
    def nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -INF) if ids.shape[1] > 3 else scores

    dice = sampler({"processors": [nothing]}, {"presence_penalty": 0.5})
    for depth in range(3):
        dice.draw(logits_of(2, depth))
    assert [len(chain) for chain in dice.chains] == [2, 3]
    draft = dice.draft()
    assert draft.num_nodes == [3, 4]
    assert draft.probs.isfinite().all()


@pytest.mark.parametrize("exact", ["law", "replay"])
def test_a_draft_that_can_be_checked_by_equality_shares_the_targets_noise(exact: str) -> None:
    """All rows greedy, or replay: no distribution is recorded, the target's own draw is guessed."""
    fields: list[dict[str, Any]] = [{"temperature": 0.0}] * 2
    if exact == "replay":
        fields = [{}, {"temperature": 0.5, "presence_penalty": 0.5}]
    dice = sampler(*fields, exact=exact)
    assert not dice.keeps_probs
    for depth in range(2):
        logits = logits_of(2, depth)
        paths = [tuple(chain) for chain in dice.chains]
        rows = [NodeContext(s, path) for s, path in zip(dice.sequences, paths, strict=True)]
        assert dice.draw(logits).tolist() == processors.draw(logits, rows)[0].tolist()
    assert dice.draft().probs is None
    assert sampler({}, {"temperature": 0.0}).keeps_probs  # one that is sampled decides for all


def test_greedy_draws_take_the_argmax_that_is_known_within_the_vocabulary() -> None:
    known = torch.tensor([2, -1])
    dice = sampler({"temperature": 0.0}, {"temperature": 0.0})
    assert dice.draw(logits_of(2, 0), best=known).tolist() == [2, 0]  # -1: none was finite
    assert dice.draw(logits_of(2, 0)).tolist() == logits_of(2, 0).argmax(-1).tolist()
    wide = logits_of(2, 0, VOCABULARY + 3)
    wide[:, VOCABULARY:] = 99.0  # tokens that the target does not have
    expected = wide[:, :VOCABULARY].argmax(-1).tolist()
    assert dice.draw(wide, best=torch.tensor([5, 6])).tolist() == expected
    ruled = sampler({"temperature": 0.0, "logit_bias": {3: 99.0}})
    assert ruled.draw(logits_of(1, 0), best=torch.tensor([2])).tolist() == [3]
    sampled = sampler({})  # there the argmax says nothing
    drawn = sampled.draw(logits_of(1, 0), best=torch.tensor([9]))
    assert drawn.tolist() == sampler({}).draw(logits_of(1, 0)).tolist()


def test_what_cannot_be_drawn_from_is_refused_before_the_draw() -> None:
    dice = sampler({}, {})
    for wrong in (torch.zeros(VOCABULARY), torch.zeros(1, VOCABULARY), torch.zeros(2, 1, 4)):
        with pytest.raises(ValueError, match="dice want logits"):
            dice.draw(wrong)
    assert dice.chains == [[], []]
    dice.sequences[1].target_noise_used = True  # who knows the target's noise may not draw
    with pytest.raises(ValueError, match="knows too much"):
        dice.draw(logits_of(2, 0))
    assert dice.chains == [[], []]
    replay = sampler({}, exact="replay")
    replay.sequences[0].target_noise_used = True
    replay.draw(logits_of(1, 0))  # there it shares that noise anyway
    assert len(replay.chains[0]) == 1


# ------------------------------------------------------- guesses with the target's noise in view


@pytest.mark.parametrize("exact", ["law", "replay"])
def test_the_heaviest_guess_is_what_the_target_would_draw(exact: str) -> None:
    """Weights: probability over arrival time, normalised over the likeliest 64."""
    dice = sampler({}, {"temperature": 0.6}, exact=exact)
    dice.vocabulary = 90
    rows, paths = [0, 1, 1], [(), (1,), (1, 2)]
    logits = logits_of(3, 5, 90)
    weights, ids = dice.noise_coupled_topk(logits, rows, paths, 5)
    assert weights.shape == ids.shape == (3, 5)
    for i, (b, path) in enumerate(zip(rows, paths, strict=True)):
        warm = logits[i] / (1.0, 0.6)[b]
        law, likely = warm.softmax(-1).topk(64)
        key = processors.target_rng_key(NodeContext(dice.sequences[b], path))
        noise = noise.uniforms([key], 90)[0][likely]
        expected = law.double() / -noise.log()
        best, at = (expected / expected.sum()).topk(5)
        assert ids[i].tolist() == likely[at].tolist()
        assert weights[i].tolist() == pytest.approx(best.tolist())
        if int(ids[i, 0]) in likely.tolist():
            whole = noise.uniforms([key], 90)[0]
            assert int(ids[i, 0]) == int((warm.softmax(-1).double() / -whole.log()).argmax())
    assert all(one.target_noise_used for one in dice.sequences)


def test_only_texts_that_were_asked_for_count_as_foreseen() -> None:
    dice = sampler({}, {})
    dice.noise_coupled_topk(logits_of(1, 0), [1], [()], 2)
    assert [one.target_noise_used for one in dice.sequences] == [False, True]


def test_greedy_guesses_go_by_likelihood_alone() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    logits = logits_of(2, 1)
    likely, order = logits.softmax(-1).topk(3)
    weights, ids = sampler(greedy, greedy).noise_coupled_topk(logits, [0, 1], [(), ()], 3)
    assert ids.tolist() == order.tolist()
    assert weights.tolist() == likely.tolist()
    mixed_weights, mixed = sampler(greedy, {}).noise_coupled_topk(logits, [0, 1], [(), ()], 3)
    assert mixed[0].tolist() == order[0].tolist()
    assert mixed_weights[0].tolist() == pytest.approx(likely[0].tolist())
    assert float(mixed_weights[1].sum()) <= 1
    assert sampler(greedy).noise_coupled_topk(logits[:1], [0], [()], 9)[1].shape == (1, VOCABULARY)
    assert sampler({}).noise_coupled_topk(logits[:1], [0], [()], 9)[1].shape == (1, VOCABULARY)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"logit_bias": {2: 9.0}}])
def test_guesses_over_a_draft_vocabulary_are_the_targets_ids(fields: dict[str, Any]) -> None:
    """The noise and the processors go by the target's ids, whatever the drafter's are."""
    some = torch.tensor([3, 2, 0])
    logits = logits_of(1, 2, 3)
    whole = torch.full((1, VOCABULARY), -1e30)
    whole[0, some] = logits[0]
    weights, ids = sampler(fields).noise_coupled_topk(logits, [0], [()], 2, some)
    expected_weights, expected = sampler(fields).noise_coupled_topk(whole, [0], [()], 2)
    assert ids.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights)
    assert int(ids[0, 0]) == 2 or "logit_bias" not in fields
