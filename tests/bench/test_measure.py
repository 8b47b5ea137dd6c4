"""Measurements: interleaved repetitions, medians, interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import zoo
from draftahead import SamplingParams, errors
from draftahead.bench.latency import measure_latency, weight_bytes
from draftahead.bench.measure import PromptBatch, batches_by_task, context_for, measure
from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.bench.report import comparison_table
from draftahead.bench.results import comparisons_of, results_of
from draftahead.models.runner import ModelRunner
from scripted_engines import Other, Scripted

TASKS = {"chat", "code", "code_edit", "summary", "question_with_context", "translation"}


def test_the_built_in_set_has_six_kinds() -> None:
    prompts = load_prompts()
    assert {p.task for p in prompts} == TASKS
    assert all(sum(p.task == task for p in prompts) >= 8 for task in TASKS)
    assert len({p.id for p in prompts}) == len(prompts)


def test_every_form_of_a_prompt_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 81, "category": "writing", "turns": ["a", "b"]}\n\n{"turns": ["c"]}\n')
    assert load_prompts(file) == [
        BenchPrompt(81, "writing", ("a", "b")),
        BenchPrompt(3, "all", ("c",)),
    ]
    file.write_text('{"turns": ["one\u2028text"]}\r\n', "utf-8")  # which is no end of a line here
    assert load_prompts(file) == [BenchPrompt(1, "all", ("one\u2028text",))]
    messages = [{"role": "user", "content": "c"}]
    lines = {"prompt": "a"}, {"text": "b"}, {"messages": messages}
    file.write_text("\ufeff" + "\n".join(map(json.dumps, lines)), "utf-8")  # as Windows writes it
    prompt, text, conversation = load_prompts(file)
    assert prompt.request(as_chat=False) == "a"
    assert prompt.request(as_chat=True) == [{"role": "user", "content": "a"}]
    assert text.request(as_chat=True) == "b"
    assert conversation.request(as_chat=False) == messages


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1, column 2: a line is a JSON object"),
        (b'{"text": "x"}\r\n\r\n{"text": 3}\r\n', "line 3: .*a text is a string"),
        (b"[" * 100_000, "line 1"),
        (b'{"turns": ["x"]}\n[]', "line 2"),
        (b'{"turns": "text"}', "turns are a list"),
        (b'{"turns": []}', "turns are a list"),
        (b'{"prompt": 3}', "a prompt is a string"),
        (b'{"messages": "x"}', "a list of objects"),
        (b'{"messages": []}', "a list of objects"),
        (b'{"text": ["x"]}', "a text is a string"),
        (b'{"id": [1], "prompt": "x"}', "an id is"),
        (b'{"id": 1}', "line 1: needs 'prompt'"),
        (b"", "holds no prompts"),
        (b'{"prompt": "caf\xe9"}', "line 1: this is not UTF-8 text .*0xe9"),
    ],
)
def test_mistakes_in_a_file_of_prompts_are_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(errors.ConfigError, match=message):
        load_prompts(file)
    for name in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(errors.ConfigError, match="cannot read"):
            load_prompts(name)


def test_configurations_are_interleaved_and_medians_count() -> None:
    log: list[str] = []
    plain = Scripted("none", [2.0, 9.0, 2.0, 4.0, 4.0, 4.0], log)
    fast = Scripted("fast", [1.0, 1.0, 7.0, 1.0, 1.0, 1.0], log)
    batches = [PromptBatch("a", [[1]]), PromptBatch("b", [[2]])]
    found = measure([plain, fast], batches, SamplingParams(max_tokens=9), repeats=3)
    order = "none fast fast none none fast fast none none fast fast none"
    assert " ".join(log[2:]) == order
    results = {(r["name"], r["task"]): r for r in results_of(found)}
    assert results["fast", "a"]["speedup"] == pytest.approx(2.0)
    assert results["fast", "overall"]["speedup"] == pytest.approx((2 + 4) / (1 + 1))
    assert results["fast", "overall"]["tokens_per_second"] == pytest.approx(20 / 2)
    assert results["fast", "overall"]["speedup_spread"] == [
        pytest.approx((2 + 4) / (7 + 1)),
        pytest.approx((9 + 4) / (1 + 1)),
    ]
    assert results["fast", "a"]["mean_acceptance_length"] == 2.0
    assert results["fast", "a"]["identical"] == 1.0


def test_an_interrupt_keeps_complete_batches() -> None:
    log: list[str] = []
    plain = Scripted("none", [2.0, 2.0, 2.0], log)
    fast = Scripted("fast", [1.0, 1.0, -1.0], log)
    batches = [PromptBatch("a", [[1]]), PromptBatch("b", [[2]])]
    found = measure([plain, fast], batches, SamplingParams(max_tokens=9), repeats=2)
    assert found.interrupted
    assert {r["task"] for r in results_of(found)} == {"a", "overall"}


def test_other_engines_are_compared_by_tokens_and_with_their_own_plain_texts() -> None:
    plain = Scripted("none", [2.0] * 4, [])
    fast = Scripted("fast", [1.0, 1.0, 1.0, 3.0], [])
    other, drafted = Other("other", [2.0] * 4), Other("other, suffix", [1.0] * 4, "abd")
    batches = [PromptBatch("a", [[1, 2, 3]])]
    found = measure([plain, fast, other, drafted], batches, SamplingParams(max_tokens=9), 4)
    results = {r["name"]: r for r in results_of(found) if r["task"] == "overall"}
    assert results["other"]["speedup"] == 0.5  # half of the tokens in the same time
    assert results["other"]["tokens"] == 5 and results["none"]["tokens"] == 10
    assert results["other"]["decode_tokens_per_second"] == pytest.approx(4 / 1.75)
    assert results["other"]["prompt_tokens_per_second"] == pytest.approx(3 / 0.25)
    assert results["other"]["decode_speedup"] == pytest.approx((2 / 10) / (1.75 / 4))
    assert results["other"]["identical_to_own"] == 1
    assert results["other, suffix"]["identical_to_own"] == 0
    assert "identical" not in results["other"]  # text, where ours are token ids
    assert results["none"]["speedup_interval"] == (1, 1)
    low, high = results["fast"]["speedup_interval"]
    assert low <= results["fast"]["speedup"] == 2 <= high and low < high
    versus = {(c["name"], c["other"]): c for c in comparisons_of(found) if c["task"] == "a"}
    assert versus["fast", "other"]["ratio"] == pytest.approx(4)
    assert versus["fast", "other, suffix"]["ratio"] == pytest.approx(2)
    assert versus["none", "other, suffix"]["interval"] == pytest.approx((1, 1))
    assert [versus["fast", name]["best"] for name in ("other", "other, suffix")] == [False, True]
    assert [versus["fast", name]["plain"] for name in ("other", "other, suffix")] == [True, False]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(comparison_table(comparisons_of(found), "title"))
    assert "2.00x" in shown.get() and "(its best)" in shown.get()


def test_a_single_repetition_has_no_interval() -> None:
    batches = [PromptBatch("a", [[1]])]
    found = measure([Scripted("none", [2.0], [])], batches, SamplingParams(max_tokens=9), 1)
    assert [row["speedup_interval"] for row in results_of(found)] == [None, None]


def test_an_engine_that_fails_is_left_out() -> None:
    log: list[str] = []
    plain = Scripted("none", [2.0] * 4, log)
    other = Other("other", [1.0, 1.0, 1.0])
    batches = [PromptBatch("a", [[1]]), PromptBatch("b", [[2]])]
    found = measure([plain, other], batches, SamplingParams(max_tokens=9), 2)
    assert found.failed == {"other": "other ended"} and not found.interrupted
    assert log == ["none"] * 5
    assert {(row["name"], row["task"]) for row in results_of(found)} == {
        ("none", task) for task in ("a", "b", "overall")
    }
    assert comparisons_of(found) == []


def test_each_batch_has_one_task() -> None:
    prompts = [BenchPrompt(str(i), "ab"[i % 2], (str(i),)) for i in range(10)]
    batches = batches_by_task(prompts, lambda prompt: [int(prompt.turns[0])], 2, limit=3)
    assert [(b.task, b.prompts) for b in batches] == [
        ("a", [[0], [2]]),
        ("a", [[4]]),
        ("b", [[1], [3]]),
        ("b", [[5]]),
    ]


def test_the_context_fits_the_longest_prompt() -> None:
    batches = [PromptBatch("a", [[1] * 30, [1] * 2000]), PromptBatch("b", [[1]])]
    assert context_for(batches, 64, limit=8192) == 2064
    assert context_for(batches, 64, limit=2048) == 2048  # generating reports the error
    # The policy measures latencies with so many KV entries: here it decides as elsewhere.
    assert context_for(batches[1:], 64, limit=8192) == 1024


def test_weight_bytes_count_what_a_forward_pass_reads() -> None:
    model = zoo.tiny("llama")
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    untied = everything - embedding.numel() * embedding.element_size()
    assert untied <= weight_bytes(model) <= untied + buffers


def test_latency_is_measured_beside_the_memory_bound() -> None:
    runner = ModelRunner(zoo.tiny("llama"), max_batch=1, max_context=64, scratch_entries=8)
    curve = measure_latency(runner, num_tokens=(1, 4), context=16, repeats=3)
    assert [row["tokens"] for row in curve["latency"]] == [1, 4]
    assert curve["memory_bound_ms"] > 0
    first = curve["latency"][0]
    assert first["over_bound"] == pytest.approx(first["ms"] / curve["memory_bound_ms"])
    assert first["over_one_token"] == 1
