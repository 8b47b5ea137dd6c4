"""Real float32 kernels: the law over the first K + 3 tokens, tested with stated power.

A G-test compares counts of whole texts with the exact law of a tiny model. Fixed seeds, no
retries. A shift of 8% of the probability mass between two halves of the cells is found with a
power above 0.999 at the level used; the last test computes that.
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
TEXTS = 8_000
SMALLEST_CELL = 100 / TEXTS
LEVEL = 1e-4
PROMPT = [5, 17, 40]


def exact_law(model: Any, keep: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Every text of LENGTH tokens with its probability, from plain forwards of the model."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(law)
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        logits = model(ids, use_cache=False).logits[:, -1].double() / temperature
        values, top = logits.topk(keep)
        chances = values.softmax(-1)
        law = {
            (*text, int(top[i, j])): law[text] * float(chances[i, j])
            for i, text in enumerate(texts)
            for j in range(keep)
        }
    return law


def cells(law: dict[tuple[int, ...], float], least: float) -> dict[tuple[int, ...], int]:
    """Texts to cells of at least this probability; rare ones share cells by their first token,
    and the rarest share one."""
    found: dict[tuple[int, ...], int] = {}
    numbers = itertools.count()
    for length in range(LENGTH, 0, -1):
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for text in law:
            if text not in found:
                groups.setdefault(text[:length], []).append(text)
        for texts in groups.values():
            total = sum(law[text] for text in texts)
            if total >= least:
                number = next(numbers)
                found.update(dict.fromkeys(texts, number))
    rest = [text for text in law if text not in found]
    found.update(dict.fromkeys(rest, next(numbers) if rest else 0))
    return found


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def law(target: Any) -> dict[tuple[int, ...], float]:
    return exact_law(target, keep=4, temperature=1.4)


def g_test(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(scipy_stats.power_divergence(counts, expected, lambda_="log-likelihood").pvalue)


def drawn(target: Any, drafter: Any, rule: Any) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=1.4, top_k=4, max_tokens=LENGTH, seed=20, n=TEXTS)
    llm = LLM(target, drafter=drafter, rule=rule, max_batch=500, max_context=16)
    return [tuple(out.token_ids) for out in llm.generate(PROMPT, sampling)]


def drafters() -> dict[str, Any]:
    other = {"method": "draft_model", "num_speculative_tokens": DEPTH}
    return {
        "block": (other, "block"),
        "token": (other, "token"),
        "lookup": ({"method": "lookup", "prompt_lookup_min": 1}, "block"),
    }


@pytest.mark.parametrize("name", ["block", "token", "lookup"])
def test_texts_follow_the_targets_law(
    name: str, target: Any, law: dict[tuple[int, ...], float]
) -> None:
    drafter, rule = drafters()[name]
    if name != "lookup":
        drafter = drafter | {"model": zoo.tiny("llama", dtype=torch.float32, seed=1)}
    texts = drawn(target, drafter, rule)
    cell_of = cells(law, least=SMALLEST_CELL)
    count = max(cell_of.values()) + 1
    counts, expected = np.zeros(count), np.zeros(count)
    for text in texts:
        counts[cell_of[text]] += 1  # a text that cannot occur is a KeyError
    for text, probability in law.items():
        expected[cell_of[text]] += TEXTS * probability
    assert count > 30
    assert expected.min() > 5
    assert g_test(counts, expected) > LEVEL


def test_the_test_has_the_power_it_claims(law: dict[tuple[int, ...], float]) -> None:
    cell_of = cells(law, least=SMALLEST_CELL)
    count = max(cell_of.values()) + 1
    expected = np.zeros(count)
    for text, probability in law.items():
        expected[cell_of[text]] += probability
    shifted = expected.copy()
    order = np.argsort(-expected)
    more, less = order[::2], order[1::2]
    shifted[more] *= 1 + 0.08 / shifted[more].sum()
    shifted[less] *= 1 - 0.08 / shifted[less].sum()
    noncentrality = 2 * TEXTS * float(np.sum(shifted * np.log(shifted / expected)))
    critical = scipy_stats.chi2.ppf(1 - LEVEL, count - 1)
    power = 1 - scipy_stats.ncx2.cdf(critical, count - 1, noncentrality)
    assert power > 0.999
