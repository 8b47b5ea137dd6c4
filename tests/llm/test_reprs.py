"""What a notebook shows: one short line."""

from __future__ import annotations

from collections.abc import Callable

import zoo
from draftahead import LLM, Completion, Stats


def test_a_completion_shows_its_text_and_its_end(both: Callable[..., Completion]) -> None:
    out = both(max_tokens=3)
    assert repr(out) == f"Completion({out.text!r}, 3 tokens, finish_reason='length')"
    assert len(repr(both(max_tokens=40))) < 130


def test_a_failed_completion_shows_why(plain: LLM) -> None:
    out = plain.generate([[]], errors="return")[0]
    assert repr(out).startswith("Completion('', 0 tokens, PromptError('the prompt is empty")


def test_stats_show_the_figures_that_matter() -> None:
    stats = Stats(tokens=24, verify_seconds=0.5)
    for _ in range(10):
        stats.add_step([1, 2], 1)
    shown = "Stats(24 tokens in 10 steps, 2.00 a step, acceptance rate 0.50, 48.0 tokens/s)"
    assert repr(stats) == shown


def test_an_llm_shows_what_runs() -> None:
    llm = LLM(zoo.tiny("llama"), "lookup")
    assert repr(llm) == "LLM(LlamaForCausalLM, drafter=Lookup, float64 on cpu)"
    assert repr(llm.config) == "LLMConfig(model=<LlamaForCausalLM>, drafter='lookup')"
