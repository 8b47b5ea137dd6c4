"""The estimated speed-up: expected tokens over measured step times."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead import LLM
from draftahead.train import estimate
from draftahead.train.estimate import SpeedupEstimate
from training import generated_data


def test_the_estimate_is_tokens_over_time() -> None:
    found = SpeedupEstimate({0: 10.0, 1: 12.0, 5: 20.0})
    # 1 drafted token: 1.5 tokens in 1.2 plain steps; 2: 1.5 + 0.4 in 1.4; 3: 1.9 in 1.6.
    assert found.best([0.5, 0.8, 0.0])[0] == pytest.approx(1.9 / 1.4)
    assert found.best([0.5, 0.8, 0.0])[1] == 2
    assert found.best([0.1, 0.1]) == (1.0, 0)
    assert "none" in found.describe([0.1, 0.1])
    text = found.describe([0.5, 0.8, 0.0])
    assert "estimated speed-up" in text
    assert "1.36x of plain decoding, with chains of 2" in text


def test_steps_are_measured_with_the_drafter_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    data = generated_data(model, 5)
    calls: list[tuple[int, list[list[int]]]] = []
    real = estimate._seconds_per_step

    def recording(llm: LLM, prompts: list[list[int]]) -> float:
        real(llm, prompts)
        drafted = getattr(llm.engine.drafter, "count", 0)
        calls.append((drafted, prompts))
        return len(calls) * (1.0 + drafted)

    monkeypatch.setattr(estimate, "_seconds_per_step", recording)
    found = estimate.measure_steps(model, {"method": "draft_model", "model": model}, data, 4)
    assert [count for count, _ in calls] == [0, 1, 4] * (1 + estimate.REPEATS)
    prompts = [
        data.text(i)[: int(data.prompt_lengths[i])].tolist() for i in range(estimate.PROMPTS)
    ]
    assert all(which == prompts for _, which in calls)
    assert found.step_seconds == {0: 4.0, 1: 10.0, 4: 30.0}  # the fastest, but for the first
