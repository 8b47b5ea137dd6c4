"""The benchmark measures what it says, and keeps what it has."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams, Stats, errors
from draftahead.bench.measure import Group, context_for, grouped, measure, results_of
from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.bench.rows import measure_rows, weight_bytes
from draftahead.bench.sides import Ours, Outcome
from draftahead.models.runner import ModelRunner
from test_cli import folder, run  # noqa: F401  (a fixture)

TASKS = {"chat", "code", "code_edit", "summary", "question_with_context", "translation"}


def test_the_built_in_set_has_six_kinds() -> None:
    prompts = load_prompts()
    assert {p.task for p in prompts} == TASKS
    assert all(sum(p.task == task for p in prompts) >= 8 for task in TASKS)
    assert len({p.id for p in prompts}) == len(prompts)


def test_files_in_spec_benchs_format(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 81, "category": "writing", "turns": ["a", "b"]}\n\n{"turns": ["c"]}\n')
    assert load_prompts(file) == [
        BenchPrompt("81", "writing", ("a", "b")),
        BenchPrompt("3", "all", ("c",)),
    ]
    file.write_text('{"turns": ["one\u2028text"]}\r\n', "utf-8")  # which is no end of a line here
    assert load_prompts(file) == [BenchPrompt("1", "all", ("one\u2028text",))]
    for bad in ("{", '{"turns": "text"}', '{"turns": []}', "[]", '{"id": 1}'):
        file.write_text(bad)
        with pytest.raises(errors.ConfigError, match="line 1"):
            load_prompts(file)
    with pytest.raises(errors.ConfigError, match="cannot read"):
        load_prompts(tmp_path / "nowhere")


class Scripted(Ours):
    """A side whose times are given: one list of seconds a turn."""

    def __init__(self, name: str, seconds: Sequence[float], log: list[str]) -> None:
        self.name, self.batch, self.log = name, 1, log
        self._seconds = iter(seconds)

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> Outcome:
        self.log.append(self.name)
        if sampling.max_tokens == 4:  # the warm-up
            return Outcome(0.0, 0, [])
        seconds = next(self._seconds)
        if seconds < 0:
            raise KeyboardInterrupt
        stats = Stats(tokens=10, steps=5, drafted=8, accepted=5, verify_seconds=seconds)
        return Outcome(seconds, 10 * len(prompts), [[1, 2]] * len(prompts), stats)


def test_sides_take_turns_and_medians_count() -> None:
    log: list[str] = []
    plain = Scripted("none", [2.0, 9.0, 2.0, 4.0, 4.0, 4.0], log)
    fast = Scripted("fast", [1.0, 1.0, 7.0, 1.0, 1.0, 1.0], log)
    groups = [Group("a", [[1]]), Group("b", [[2]])]
    found = measure([plain, fast], groups, SamplingParams(max_tokens=9), repeats=3)
    turns = "none fast fast none none fast fast none none fast fast none"
    assert " ".join(log[2:]) == turns
    results = {(r["name"], r["task"]): r for r in results_of(found, plain="none")}
    assert results["fast", "a"]["speedup"] == pytest.approx(2.0)
    assert results["fast", "overall"]["speedup"] == pytest.approx((2 + 4) / (1 + 1))
    assert results["fast", "overall"]["tokens_per_second"] == pytest.approx(20 / 2)
    assert results["fast", "overall"]["speedup_spread"] == [
        pytest.approx((2 + 4) / (7 + 1)),
        pytest.approx((9 + 4) / (1 + 1)),
    ]
    assert results["fast", "a"]["mean_acceptance_length"] == 2.0
    assert results["fast", "a"]["identical"] == 1.0


def test_an_interrupt_keeps_what_is_there() -> None:
    log: list[str] = []
    plain = Scripted("none", [2.0, 2.0, 2.0], log)
    fast = Scripted("fast", [1.0, 1.0, -1.0], log)
    groups = [Group("a", [[1]]), Group("b", [[2]])]
    found = measure([plain, fast], groups, SamplingParams(max_tokens=9), repeats=2)
    assert found.interrupted
    assert {r["task"] for r in results_of(found, plain="none")} == {"a", "overall"}


def test_groups_are_of_one_task() -> None:
    prompts = [BenchPrompt(str(i), "ab"[i % 2], (str(i),)) for i in range(10)]
    groups = grouped(prompts, lambda messages: [int(messages[0]["content"])], 2, limit=3)
    assert [(g.task, g.prompts) for g in groups] == [
        ("a", [[0], [2]]),
        ("a", [[4]]),
        ("b", [[1], [3]]),
        ("b", [[5]]),
    ]


def test_weight_bytes_count_what_a_pass_reads() -> None:
    model = zoo.tiny("llama")
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    untied = everything - embedding.numel() * embedding.element_size()
    assert untied <= weight_bytes(model) <= untied + buffers


def test_rows_are_measured_beside_the_limit() -> None:
    passes = ModelRunner(zoo.tiny("llama"), max_batch=1, max_context=64, spare=8)
    curve = measure_rows(passes, rows=(1, 4), context=16, repeats=3)
    assert [row["rows"] for row in curve["rows"]] == [1, 4]
    assert curve["memory_limit_ms"] > 0
    first = curve["rows"][0]
    assert first["over_limit"] == pytest.approx(first["ms"] / curve["memory_limit_ms"])
    assert first["over_one_row"] == 1


def test_the_command_writes_all_figures(
    folder: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out, picture = (tmp_path / name for name in ("p.jsonl", "out.json", "out.png"))
    lines = [{"task": task, "turns": ["w5 w6 w7 w5 w6"]} for task in ("x", "y", "y")]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["bench", "--model", folder, "--prompts", str(prompts), "--max-tokens", "8"]
    arguments += ["--batch", "1,2", "--rows", "--against", "transformers", "--repeats", "2"]
    arguments += ["--json", str(out), "--plot", str(picture)]
    assert run(monkeypatch, *arguments) == 0
    report = json.loads(out.read_text())
    assert {"versions", "machine", "argv", "commit", "peak_memory_bytes"} <= report.keys()
    assert report["argv"] == sys.argv[1:]
    assert [row["rows"] for row in report["rows"]][:2] == [1, 2]
    assert report["memory_limit_ms"] > 0
    keys = {"drafter", "task", "batch", "tokens_per_second", "speedup"}
    keys |= {"mean_acceptance_length", "acceptance_rate", "identical"}
    sides = {(r["drafter"], r["batch"], r["task"]) for r in report["results"]}
    assert all(keys <= row.keys() for row in report["results"])
    assert {("lookup", 1, "overall"), ("none", 2, "y"), ("lookup", 2, "x")} <= sides
    assert all(row["identical"] == 1 for row in report["results"])
    peers = {row["name"] for row in report["peers"]}
    assert peers == {"transformers", "transformers prompt look-up"}
    assert all(row["identical"] == 1 for row in report["peers"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "overall" in capsys.readouterr().out


def test_a_shape_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft agrees as often as asked, and what is predicted follows from what is measured."""
    out = tmp_path / "out.json"
    arguments = ["bench", "--shape", "tiny", "--agreement", "0.7", "--max-tokens", "48", "-k", "3"]
    arguments += ["--repeats", "1", "--against", "transformers", "--device", "cpu"]
    assert run(monkeypatch, *arguments, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["agreement"] == pytest.approx(0.7, abs=0.15)
    drafted = next(r for r in report["results"] if r["drafter"] == "draft_model")
    assert drafted["accepted_at"][0] / drafted["drafted_at"][0] == pytest.approx(
        report["agreement"], abs=0.02
    )
    perfect = next(r for r in report["results"] if r["drafter"] == "perfect")
    assert perfect["acceptance_rate"] == 1
    assert all(row["identical"] == 1 for row in report["results"])
    target = {row["rows"]: row["median_ms"] for row in report["rows"]}
    draft = {row["rows"]: row["median_ms"] for row in report["draft_rows"]}
    step = target[4] + draft[2] + 2 * draft[1]
    length = report["mean_acceptance_length"]
    assert report["predicted_speedup"] == pytest.approx(length * target[1] / step)
    ratio = report["speedup"] / report["predicted_speedup"]
    assert report["measured_over_predicted"] == pytest.approx(ratio)
    assert {row["name"] for row in report["peers"]} == {"transformers", "transformers assisted"}
    assert "measured over predicted" in capsys.readouterr().out


def test_sides_hold_the_context_they_need() -> None:
    groups = [Group("a", [[1] * 30, [1] * 2000]), Group("b", [[1]])]
    assert context_for(groups, 64, limit=8192) == 2064
    assert context_for(groups, 64, limit=2048) == 2048  # and generating tells what is wrong
    # The policy measures passes over so many keys: here it should see what it sees elsewhere.
    assert context_for(groups[1:], 64, limit=8192) == 1024


def test_no_batch_size_finds_the_caches_of_another(
    folder: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []  # caches of sides, when another is made
    sibling = LLM.sibling

    def noted(first: LLM, *args: Any, **kwargs: Any) -> LLM:
        alive.append(sum(cache() is not None for cache in made))
        llm = sibling(first, *args, **kwargs)
        made.append(weakref.ref(llm.engine.verifier.runner.cache))
        return llm

    monkeypatch.setattr(LLM, "with_drafter", noted)
    arguments = ["bench", "--model", folder, "--prompts", "random", "--max-tokens", "4"]
    arguments += ["--batch", "2,3", "--repeats", "1", "--drafter", "lookup,auto"]
    assert run(monkeypatch, *arguments) == 0
    assert alive == [0, 1, 2, 0, 1, 2]
    assert "batch 3: only 2 prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "lama-8b"), "did you mean 'llama-8b'"),
        (("--shape", "tiny", "--agreement", "1.5"), "--agreement must be"),
        (("--shape", "tiny", "--dtype", "floaty"), "unknown dtype"),
        (("--against", "transfomers"), "did you mean 'transformers'"),
        (("--batch", "1,x"), "whole numbers"),
        (("--json", "/nowhere/x.json"), "cannot write"),
        (("--against", "llama.cpp"), "embedded model|pip install xllamacpp"),
    ],
)
def test_bad_options(
    folder: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    import re

    assert run(monkeypatch, "bench", "--model", folder, *arguments) == 1
    assert re.search(message, capsys.readouterr().err)


def test_figures_are_json(tmp_path: Path) -> None:
    from draftahead.bench.machine import peak_memory, provenance

    told: dict[str, Any] = json.loads(json.dumps(provenance()))
    assert told["versions"]["torch"]
    import torch

    assert peak_memory(torch.device("cpu")) > 1 << 20


def test_tune_tells_what_each_number_of_guesses_is_worth(
    folder: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out, picture = (tmp_path / name for name in ("p.jsonl", "out.json", "out.png"))
    prompts.write_text(json.dumps({"turns": ["w5 w6 w7 w5 w6 w7 w5 w6"]}))
    arguments = ["tune", "--model", folder, "--prompts", str(prompts), "--guesses", "2,5"]
    arguments += ["--max-tokens", "24", "--json", str(out), "--plot", str(picture)]
    assert run(monkeypatch, *arguments) == 0
    report = json.loads(out.read_text())
    assert [row["guesses"] for row in report["choices"]] == ["2", "5", "as pays"]
    assert all(row["identical"] == 1 for row in report["choices"])
    (plain,) = [r for r in report["results"] if r["drafter"] == "none" and r["task"] == "overall"]
    assert plain["steps_by_nodes"] == [24]
    times = {row["rows"]: row["mean_ms"] for row in report["passes"]}
    for row in report["results"]:
        if row["drafter"] == "2" and row["task"] == "overall":
            passes = sum(n * times.get(i, 0) for i, n in enumerate(row["steps_by_nodes"], 1))
            whole = passes + 1e3 * row["seconds_by_stage"]["draft"]
            predicted = 24 * times[1] / whole
            if set(times) >= {i for i, n in enumerate(row["steps_by_nodes"], 1) if n}:
                assert report["choices"][0]["predicted_speedup"] == pytest.approx(predicted)
    assert report["depths"][0]["depth"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = " ".join(capsys.readouterr().out.split())
    assert "acceptance by depth" in said and "tokens a step; by these times" in said
    for wrong in (["--guesses", "0"], ["--guesses", ""], ["--drafter", "none"]):
        assert run(monkeypatch, *arguments, *wrong) == 1
        assert "error: " in capsys.readouterr().err


def test_random_prompts_and_the_worst_of_them(
    folder: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.json"
    arguments = ["bench", "--model", folder, "--prompts", "random", "--limit", "3", "--rows"]
    arguments += ["--max-tokens", "8", "--temperature", "1.5", "--json", str(out)]
    assert run(monkeypatch, *arguments, "--drafter", "auto") == 0
    report = json.loads(out.read_text())
    by_name = {r["drafter"]: r for r in report["results"] if r["task"] == "random"}
    assert by_name["none"]["worst_modelled_speedup"] == 1
    assert 0 < by_name["auto"]["worst_modelled_speedup"] < 3
    assert by_name["auto"]["identical"] == 1
