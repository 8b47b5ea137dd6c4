"""Each training raises acceptance, and what it simulates is what the drafter then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.drafters.medusa.heads import new_heads
from draftahead.train.batches import TrainBatches
from draftahead.train.config import TrainConfig
from draftahead.train.dataset import Dataset
from draftahead.train.loop import TrainLoop
from draftahead.train.medusa import MedusaTask
from training import TASKS, eagle_task, generated_data, held_out, medusa_task


@pytest.mark.parametrize("make", TASKS)
def test_short_texts_count_the_same_alone_and_beside_longer_ones(make: Any) -> None:
    """Batches hold texts of similar length, so short ones form batches of their own."""
    model = zoo.tiny("llama", dtype=torch.float32)
    sizes = (3, 3, 3, 18)
    continuations = [
        zoo.reference(model, prompt, 18) for prompt in ([1, 2], [5, 6], [7, 3], [4, 9])
    ]
    data = Dataset.of(
        [(text[:2], text[2:size]) for text, size in zip(continuations, sizes, strict=True)]
    )
    task = make(model, data)
    if make is not medusa_task:  # it has three heads
        task.depth = 5  # longer than a text
    apart = TrainBatches(data, model, task.aux_layers, tokens=18)
    assert [batch.tokens.shape[1] for batch in apart].count(3) == 1 < len(apart)
    assert task.evaluate(apart) == task.evaluate(held_out(model, data, task))
    for batch in apart:
        loss = task.loss(batch)
        loss.backward()
        assert loss.isfinite()


def test_a_draft_vocabulary_smaller_than_the_candidates_of_a_head() -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    data = generated_data(model, 4)
    heads = new_heads(model, 3, draft_to_target=data.most_frequent(5, zoo.VOCABULARY))
    task = MedusaTask(heads, model)
    task.evaluate(held_out(model, data, task))
    assert heads.choices and max(max(path) for path in heads.choices) < 5


@pytest.mark.parametrize("make", TASKS)
def test_training_raises_acceptance_as_simulated(make: Any, tmp_path: Path) -> None:
    """On a few texts of the target acceptance rises well above chance, and the simulated acceptance
    is that of a drafter with these weights."""
    torch.manual_seed(0)
    model = zoo.tiny("llama", dtype=torch.float32)
    data = generated_data(model)
    task = make(model, data)
    texts = held_out(model, data, task)
    before = task.evaluate(texts).length
    batches = TrainBatches(data, model, task.aux_layers, tokens=400, cache_bytes=10**7)
    config = TrainConfig(steps=200, lr=5e-3, warmup=5, ema_decay=0.9, eval_interval=200)
    history = TrainLoop(task, config, tmp_path, batches.from_step, texts).run()
    assert history.lengths[-1] > before + (0.05 if make is medusa_task else 0.5)
    drafter = {"method": task.method, task.file_key: str(tmp_path), "num_speculative_tokens": 3}
    llm = LLM(model, drafter, max_batch=1)
    steps = tokens = 0
    for index in range(len(data)):
        text, at = data.text(index).tolist(), int(data.prompt_lengths[index])
        params = SamplingParams(temperature=0, max_tokens=len(text) - at, ignore_eos=True)
        out = llm.generate(text[:at], params)[0]
        assert out.token_ids == text[at:]
        steps, tokens = steps + out.stats.steps, tokens + out.stats.tokens
    # Medusa has no hidden state before the first step of a sequence, so it drafts nothing there;
    # and its files and EAGLE's hold bfloat16. The others are exact.
    rough = make in (eagle_task, medusa_task)
    assert tokens / steps == pytest.approx(history.lengths[-1], rel=0.1 if rough else 1e-9)
