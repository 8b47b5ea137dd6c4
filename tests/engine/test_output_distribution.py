"""The distribution of whole outputs in float32: a G-test over the first K + 3 tokens.

Counts of outputs are compared with the exact distribution of a tiny model. Fixed seeds, no retries.
A shift of 8% of the probability mass between two halves of the cells is found with a power above
0.999 at the level used; the last test computes that.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import zoo
from draftahead import LLM, SamplingParams

DEPTH = 2  # K
LENGTH = DEPTH + 3
OUTPUTS = 8_000
SMALLEST_CELL = 100 / OUTPUTS
LEVEL = 1e-4
PROMPT = [5, 17, 40]
TOP_K, TEMPERATURE = 4, 1.4

Distribution = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def exact(target: Any) -> Distribution:
    """Every output of LENGTH tokens with its probability, from plain forwards of the model."""
    found: Distribution = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(found)
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        logits = target(ids, use_cache=False).logits[:, -1].double() / TEMPERATURE
        values, top = logits.topk(TOP_K)
        probs = values.softmax(-1)
        found = {
            (*text, int(top[i, j])): found[text] * float(probs[i, j])
            for i, text in enumerate(texts)
            for j in range(TOP_K)
        }
    return found


@pytest.fixture(scope="module")
def cells(exact: Distribution) -> dict[tuple[int, ...], int]:
    """Outputs to cells of at least SMALLEST_CELL; rare ones share cells by their first tokens, and
    the rarest share one."""
    found: dict[tuple[int, ...], int] = {}
    numbers = itertools.count()
    for length in range(LENGTH, 0, -1):
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for text in exact:
            if text not in found:
                groups.setdefault(text[:length], []).append(text)
        for texts in groups.values():
            if sum(exact[text] for text in texts) >= SMALLEST_CELL:
                found.update(dict.fromkeys(texts, next(numbers)))
    rest = [text for text in exact if text not in found]
    found.update(dict.fromkeys(rest, next(numbers) if rest else 0))
    return found


@pytest.fixture(scope="module")
def expected(exact: Distribution, cells: dict[tuple[int, ...], int]) -> np.ndarray:
    """The probability of each cell."""
    found = np.zeros(max(cells.values()) + 1)
    for text, probability in exact.items():
        found[cells[text]] += probability
    return found


DRAFTERS: dict[str, tuple[dict[str, Any], str]] = {
    "block": ({"method": "draft_model", "num_speculative_tokens": DEPTH}, "block"),
    "token": ({"method": "draft_model", "num_speculative_tokens": DEPTH}, "token"),
    "lookup": ({"method": "lookup", "prompt_lookup_min": 1}, "block"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_follow_the_targets_distribution(
    name: str, target: Any, cells: dict[tuple[int, ...], int], expected: np.ndarray
) -> None:
    drafter, rule = DRAFTERS[name]
    if drafter["method"] == "draft_model":
        drafter = drafter | {"model": zoo.tiny("llama", dtype=torch.float32, seed=1)}
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=LENGTH, seed=20, n=OUTPUTS
    )
    llm = LLM(target, drafter=drafter, rule=rule, max_batch=500, max_context=16)
    counts = np.zeros(len(expected))
    for out in llm.generate(PROMPT, params):
        counts[cells[tuple(out.token_ids)]] += 1  # an output that cannot occur is a KeyError
    assert len(expected) > 30
    assert OUTPUTS * expected.min() > 5
    test = scipy_stats.power_divergence(counts, OUTPUTS * expected, lambda_="log-likelihood")
    assert float(test.pvalue) > LEVEL


def test_the_g_test_has_the_stated_power(expected: np.ndarray) -> None:
    shifted = expected.copy()
    order = np.argsort(-expected)
    more, less = order[::2], order[1::2]
    shifted[more] *= 1 + 0.08 / shifted[more].sum()
    shifted[less] *= 1 - 0.08 / shifted[less].sum()
    noncentrality = 2 * OUTPUTS * float(np.sum(shifted * np.log(shifted / expected)))
    critical = scipy_stats.chi2.ppf(1 - LEVEL, len(expected) - 1)
    power = 1 - scipy_stats.ncx2.cdf(critical, len(expected) - 1, noncentrality)
    assert power > 0.999
