"""`draftahead bench` and `tune`: tables, JSON reports, figures, mistakes."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run
from draftahead import LLM, SamplingParams
from draftahead.bench.configurations import Draftahead, Outcome
from draftahead.bench.machine import peak_memory, provenance


def test_bench_writes_tables_json_and_a_figure(
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out, picture = (tmp_path / name for name in ("p.jsonl", "out.json", "out.png"))
    lines = [{"task": task, "turns": ["w5 w6 w7 w5 w6"]} for task in ("x", "y", "y")]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["bench", "--model", model_folder, "--prompts", str(prompts), "--max-tokens", "8"]
    arguments += ["--batch", "1,2", "--latency", "--against", "transformers", "--repeats", "2"]
    arguments += ["--json", str(out), "--plot", str(picture)]
    assert run(*arguments) == 0
    report = json.loads(out.read_text())
    assert {"versions", "machine", "argv", "commit", "peak_memory_bytes"} <= report.keys()
    assert report["argv"] == arguments
    assert [row["tokens"] for row in report["latency"]][:2] == [1, 2]
    assert report["memory_bound_ms"] > 0
    keys = {"drafter", "task", "batch", "tokens_per_second", "speedup"}
    keys |= {"mean_acceptance_length", "acceptance_rate", "identical"}
    measured = {(r["drafter"], r["batch"], r["task"]) for r in report["results"]}
    assert all(keys <= row.keys() for row in report["results"])
    assert {("lookup", 1, "overall"), ("none", 2, "y"), ("lookup", 2, "x")} <= measured
    assert all(row["identical"] == 1 for row in report["results"])
    engines = {row["name"] for row in report["other_engines"]}
    assert engines == {"transformers", "transformers prompt look-up"}
    assert all(row["identical"] == 1 for row in report["other_engines"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "overall" in capsys.readouterr().out


def test_a_shape_with_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft model has the requested acceptance rate; predictions follow from measurements."""
    out = tmp_path / "out.json"
    arguments = [
        "bench",
        "--shape",
        "tiny",
        "--acceptance-rate",
        "0.7",
        "--max-tokens",
        "48",
        "-k",
        "3",
    ]
    arguments += ["--repeats", "1", "--against", "transformers", "--device", "cpu"]
    assert run(*arguments, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["simulated_acceptance_rate"] == pytest.approx(0.7, abs=0.15)
    drafted = next(r for r in report["results"] if r["drafter"] == "draft_model")
    assert drafted["accepted_at"][0] / drafted["drafted_at"][0] == pytest.approx(
        report["simulated_acceptance_rate"], abs=0.02
    )
    perfect = next(r for r in report["results"] if r["drafter"] == "perfect")
    assert perfect["acceptance_rate"] == 1
    assert all(row["identical"] == 1 for row in report["results"])
    target = {row["tokens"]: row["median_ms"] for row in report["latency"]}
    draft = {row["tokens"]: row["median_ms"] for row in report["draft_latency"]}
    step = target[4] + draft[2] + 2 * draft[1]
    length = report["mean_acceptance_length"]
    assert report["predicted_speedup"] == pytest.approx(length * target[1] / step)
    ratio = report["speedup"] / report["predicted_speedup"]
    assert report["measured_over_predicted"] == pytest.approx(ratio)
    assert {row["name"] for row in report["other_engines"]} == {
        "transformers",
        "transformers assisted",
    }
    assert "measured over predicted" in capsys.readouterr().out


def test_kv_caches_are_freed_before_the_next_batch_size(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []  # KV caches in memory when another is made
    with_drafter = LLM.with_drafter

    def recorded(first: LLM, *args: Any, **kwargs: Any) -> LLM:
        alive.append(sum(cache() is not None for cache in made))
        llm = with_drafter(first, *args, **kwargs)
        made.append(weakref.ref(llm.engine.verifier.runner.cache))
        return llm

    monkeypatch.setattr(LLM, "with_drafter", recorded)
    arguments = ["bench", "--model", model_folder, "--prompts", "random", "--max-tokens", "4"]
    arguments += ["--batch", "2,3", "--repeats", "1", "--drafter", "lookup,auto"]
    assert run(*arguments) == 0
    assert alive == [0, 1, 2, 0, 1, 2]
    assert "batch 3: a task has at most 2 prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "lama-8b"), "did you mean 'llama-8b'"),
        (("--shape", "tiny", "--acceptance-rate", "1.5"), "--acceptance-rate must be"),
        (("--shape", "tiny", "--dtype", "floaty"), "unknown dtype"),
        (("--against", "transfomers"), "did you mean 'transformers'"),
        (("--batch", "1,x"), "whole numbers"),
        (("--drafter", "lookup,suffix", "--draft-model", "x"), "none of lookup, suffix drafts"),
        (("--drafter", "eagle", "--draft-model", "/no/head"), "/no/head"),
        (("--json", "/nowhere/x.json"), "cannot write"),
        (("--against", "llama.cpp"), "reads GGUF: --model .* is no .gguf file"),
        (("--shape", "tiny", "--against", "llama.cpp"), "reads GGUF"),
        (("--against", "transformers", "--against-modes", "none"), "--against-modes is for"),
    ],
)
def test_bad_options(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    model = () if "--shape" in arguments else ("--model", model_folder)
    assert run("bench", *model, *arguments) == 1
    assert re.search(message, capsys.readouterr().err)


def test_provenance_is_json(tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(json.dumps(provenance()))
    assert found["versions"]["torch"]
    assert peak_memory(torch.device("cpu")) > 1 << 20


def test_tune_reports_the_speedup_of_each_number(
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out, picture = (tmp_path / name for name in ("p.jsonl", "out.json", "out.png"))
    prompts.write_text(json.dumps({"turns": ["w5 w6 w7 w5 w6 w7 w5 w6"]}))
    arguments = ["tune", "--model", model_folder, "--prompts", str(prompts), "-k", "2,5"]
    arguments += ["--max-tokens", "24", "--json", str(out), "--plot", str(picture)]
    assert run(*arguments) == 0
    report = json.loads(out.read_text())
    assert [row["num_speculative_tokens"] for row in report["speedups"]] == ["2", "5", "automatic"]
    assert all(row["identical"] == 1 for row in report["speedups"])
    (plain,) = [r for r in report["results"] if r["drafter"] == "none" and r["task"] == "overall"]
    assert plain["steps_by_nodes"] == [24]
    times = {row["tokens"]: row["mean_ms"] for row in report["forward"]}
    for row in report["results"]:
        if row["drafter"] == "2" and row["task"] == "overall":
            verifying = sum(n * times.get(i, 0) for i, n in enumerate(row["steps_by_nodes"], 1))
            whole = verifying + 1e3 * row["seconds_by_stage"]["draft"]
            predicted = 24 * times[1] / whole
            if set(times) >= {i for i, n in enumerate(row["steps_by_nodes"], 1) if n}:
                assert report["speedups"][0]["predicted_speedup"] == pytest.approx(predicted)
    assert report["positions"][0]["position"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(capsys.readouterr().out.split())
    assert "acceptance by position" in shown and "speed-up by number of drafted tokens" in shown
    for wrong in (["-k", "0"], ["-k", ""], ["--drafter", "none"]):
        assert run(*arguments, *wrong) == 1
        assert "error: " in capsys.readouterr().err


def test_random_prompts_report_the_worst_prediction(
    model_folder: str,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "bench",
        "--model",
        model_folder,
        "--prompts",
        "random",
        "--limit",
        "3",
        "--latency",
    ]
    arguments += ["--max-tokens", "8", "--temperature", "1.5", "--json", str(out)]
    assert run(*arguments, "--drafter", "auto") == 0
    report = json.loads(out.read_text())
    by_name = {r["drafter"]: r for r in report["results"] if r["task"] == "random"}
    assert by_name["none"]["worst_predicted_speedup"] == 1
    assert 0 < by_name["auto"]["worst_predicted_speedup"] < 3
    assert by_name["auto"]["identical"] == 1


def test_prompts_of_every_form_and_configurations_as_json(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    message = {"role": "user", "content": "w7 w8"}
    lines = {"prompt": "w5 w6"}, {"text": "w5 w6"}, {"messages": [message]}, {"turns": ["w9"]}
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["bench", "--model", model_folder, "--prompts", str(prompts), "--max-tokens", "4"]
    arguments += ["--repeats", "1", "--drafter", "none", "--limit", "9", "--json", str(out)]
    for number in (2, 3):
        config = {"method": "lookup", "num_speculative_tokens": number}
        arguments += ["--speculative-config", json.dumps(config)]
    assert run(*arguments, "--exact", "replay", "--max-context", "64") == 0
    results = json.loads(out.read_text())["results"]
    assert {row["drafter"] for row in results} == {
        "none",
        "lookup(num_speculative_tokens=2)",
        "lookup(num_speculative_tokens=3)",
    }
    assert all(row["prompts"] == 4 and row["identical"] == 1 for row in results)
    assert run(*arguments, "--max-context", "5") == 1
    assert "exceed the context of 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (("bench", "--batch", "1,2"), "these are the results so far"),
        (("bench",), "these are the results so far"),
        (("tune", "-k", "2"), "these are the results so far"),
    ],
)
def test_ctrl_c_keeps_the_results_and_is_an_exit_code(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    kept: str,
) -> None:
    """Interrupted in the second prompt."""
    out, picture, prompts = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("w5 w6", "w7 w8")))
    real = Draftahead.run

    def run_once(self: Draftahead, given: Any, params: SamplingParams) -> Outcome:
        if given[0][0] == 7:
            raise KeyboardInterrupt
        return real(self, given, params)

    monkeypatch.setattr(Draftahead, "run", run_once)
    arguments = ("--model", model_folder, "--prompts", str(prompts), "--max-tokens", "8")
    arguments = (*arguments, "--limit", "2", "--repeats", "1", "--json", str(out))
    assert run(*command, *arguments, "--plot", str(picture)) == 130
    assert kept in capsys.readouterr().err
    report = json.loads(out.read_text())
    assert report["interrupted"] is True
    assert {row["task"] for row in report["results"]} == {"all", "overall"}
    assert picture.exists()


@pytest.mark.parametrize("moment", ["first prompt", "drafters"])
def test_ctrl_c_before_the_first_result_says_so(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    owner, name = (Draftahead, "run") if moment == "first prompt" else (LLM, "with_drafter")
    monkeypatch.setattr(owner, name, interrupted)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("--model", model_folder, "--prompts", "random", "--limit", "1")
    assert run("bench", *arguments, "--json", str(out), "--plot", str(picture)) == 130
    assert "there are no results" in capsys.readouterr().err
    assert not out.exists() and not picture.exists()
    assert run("tune", *arguments) == 130
    assert run("bench", "--shape", "tiny", "--max-tokens", "2", "--limit", "1") == 130
    assert "Traceback" not in capsys.readouterr().err
