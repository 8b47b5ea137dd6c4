"""`draftahead train`, as a user runs it: in one process, in two, with mistakes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from command_line import run
from draftahead import LLM, SamplingParams
from draftahead.loader import hub
from draftahead.train.dataset import Dataset, read_data, write_texts
from draftahead.train.loop import CHECKPOINT, HISTORY, TrainLoop


@pytest.fixture(scope="module")
def data(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Training data from random prompts, by the command."""
    place, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    prompts = [[f"w{rng.randrange(97)}" for _ in range(rng.randrange(3, 9))] for _ in range(24)]
    lines = [json.dumps({"prompt": " ".join(prompt)}) for prompt in prompts]
    lines.append(json.dumps({"text": "w3 w4 w5 w6 w7 w8"}))
    (place / "prompts.jsonl").write_text("\n".join(lines))
    command = ["data", "--prompts", str(place / "prompts.jsonl"), "--out", str(place / "out")]
    assert run("train", *command, "--model", model_folder, "--max-tokens", "12") == 0
    return str(place / "out")


SMALL = ("--steps", "6", "--eval-interval", "3", "--tokens", "120", "--warmup", "2", "--lr", "0.01")


KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "eagle": (("--aux-layers", "1,2", "--draft-vocabulary", "60", "--depth", "2"), "eagle"),
    "medusa": (
        (
            "--heads",
            "2",
        ),
        "medusa",
    ),
    "exit": (("--layer", "2", "--rank", "4", "--depth", "2"), "early_exit"),
    "distill": (("--layers", "2", "--depth", "2"), "draft_model"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_trains_a_drafter(
    kind: str,
    model_folder: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options, method = KINDS[kind]
    out, picture = tmp_path / "out", tmp_path / "training.png"
    common = ("train", kind, "--model", model_folder, "--data", data, "--out", str(out), *SMALL)
    kept = ("--cache-hidden-states", "0.001", "--hidden-states-folder", str(tmp_path / "states"))
    assert run(*common, *options, *kept, "--plot", str(picture)) == 0
    shown = capsys.readouterr()
    assert "acceptance length" in shown.out
    assert "estimated speed-up for one sequence on this machine" in shown.out
    assert "step 6 of 6: loss" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "states").iterdir())
    assert json.loads((out / HISTORY).read_text())["steps"] == [3, 6]
    key = "adapter" if method == "early_exit" else "model"
    llm = LLM(model_folder, {"method": method, key: str(out), "num_speculative_tokens": 2})
    greedy = SamplingParams(temperature=0, max_tokens=12)
    completion = llm.generate("w5 w6 w7", greedy)[0]
    assert completion.stats.drafted > 0
    assert (
        completion.token_ids == LLM(model_folder, "none").generate("w5 w6 w7", greedy)[0].token_ids
    )
    # The same folder again is refused, unless the training is to be continued.
    assert run(*common, *options) == 1
    assert "--resume" in capsys.readouterr().err
    assert run(*common, *options, "--steps", "9", "--resume") == 0
    assert "continuing from step 6" in capsys.readouterr().err


def test_ctrl_c_says_whether_the_training_can_go_on(
    model_folder: str,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Before the first evaluation there is nothing to continue, and no folder is left."""
    last, real = 2, TrainLoop._step

    def step(loop: TrainLoop, batches: Any) -> Any:
        if loop.step == last:
            raise KeyboardInterrupt
        return real(loop, batches)

    monkeypatch.setattr(TrainLoop, "_step", step)
    out = tmp_path / "out"
    common = ("train", "medusa", "--model", model_folder, "--data", data, "--out", str(out), *SMALL)
    assert run(*common) == 130
    assert "--resume" not in capsys.readouterr().err and not out.exists()
    last = 4  # SMALL evaluates after 3 steps
    assert run(*common) == 130
    assert "--resume goes on from the last evaluation" in capsys.readouterr().err
    assert (out / CHECKPOINT).exists()


def test_export_writes_the_lm_head(
    model_folder: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    head, out = str(tmp_path / "head"), tmp_path / "out"
    common = ("--model", model_folder, "--data", data, "--out", head, *SMALL)
    assert run("train", "eagle", *common, *KINDS["eagle"][0]) == 0
    export = ("train", "export", "--head", head, "--model", model_folder, "--out")
    assert run(*export, str(out)) == 0
    assert "lm_head weights of 60 tokens" in capsys.readouterr().out
    model, _ = hub.load(model_folder)
    weights = load_file(out / "model.safetensors")
    tokens = weights["d2t"] + torch.arange(60)
    expected = model.get_output_embeddings().weight[tokens].bfloat16()
    assert torch.equal(weights["lm_head.weight"], expected)
    config = json.loads((out / "config.json").read_text())["speculators_config"]
    assert config["verifier"]["name_or_path"] == model_folder
    assert config["proposal_methods"][0]["speculative_tokens"] == 2


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no data": (("medusa", "--data", "nowhere"), "nowhere holds no training data"),
    "no such layer": (("eagle", "--aux-layers", "1,9"), "after 1 to 3 layers, not [1, 9]"),
    "no numbers": (("eagle", "--aux-layers", "1,x"), "--aux-layers takes whole numbers"),
    "too small": (("eagle",), "after 1 to 3 layers"),
    "lr": (("medusa", "--lr", "-1"), "lr must be above 0"),
    "layers": (("distill", "--layers", "4"), "--layers must be 1 to the target's 3, not 4"),
    "heads": (("distill", "--layers", "1", "--num-heads", "2"), "give --hidden-size as well"),
    "hidden size": (("distill", "--layers", "1", "--hidden-size", "31"), "does not divide"),
    "shard": (("data", "--shard", "3"), "--shard takes a number and a count"),
    "shards": (("data", "--shard", "3/2"), "the first number must be 1 to 2"),
    "odd digits": (("data", "--shard", "²/³"), "--shard takes a number and a count"),
    "no cache": (("medusa", "--hidden-states-folder", "x"), "needs --cache-hidden-states GB"),
    "no folder": (("medusa", "--out", __file__), "cannot write to"),
    "no data folder": (("data", "--out", __file__), "cannot write to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str,
    model_folder: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given, message = BAD[name]
    needed = {"--model": model_folder, "--out": str(tmp_path / "out")}
    needed |= {"--prompts": "x"} if given[0] == "data" else {"--data": data}
    rest = [word for key, value in needed.items() if key not in given for word in (key, value)]
    assert run("train", *given, *rest) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out" / CHECKPOINT).exists()


def test_an_impossible_plot_is_reported_before_the_training(
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    common = ("train", "medusa", "--model", "no/model", "--data", data, "--out", "out")
    assert run(*common, "--plot", str(tmp_path / "none" / "a.png")) == 1
    assert "cannot write" in capsys.readouterr().err
    assert run(*common, "--heads", "0") == 2
    assert "--heads" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(*common, "--plot", str(tmp_path / "a.png")) == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_data_of_another_model_is_refused(
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small = LlamaConfig(vocab_size=40, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "m")
    zoo.tokenizer().save_pretrained(tmp_path / "m")
    out = ("--out", str(tmp_path / "out"), "--data", data)
    assert run("train", "medusa", "--model", str(tmp_path / "m"), *out) == 1
    assert "holds tokens outside" in capsys.readouterr().err


def test_held_out_data_is_checked_as_well(
    model_folder: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    common = ("train", "medusa", "--model", model_folder, "--out", str(tmp_path / "out"))
    write_texts(Dataset.of([([1, 2], [3, zoo.VOCABULARY])]), tmp_path / "others")
    assert run(*common, "--data", data, "--held-out", str(tmp_path / "others"))
    assert "holds tokens outside" in capsys.readouterr().err
    write_texts(Dataset.of([([], []), ([], [])]), tmp_path / "nothing")
    assert run(*common, "--data", str(tmp_path / "nothing")) == 1
    assert "no text has tokens to learn" in capsys.readouterr().err


def test_a_training_continues_with_its_own_data_only(
    model_folder: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Other data would change the draft vocabulary, and hold out texts that were trained on."""
    common = ("train", "eagle", "--model", model_folder, "--out", str(tmp_path / "out"), *SMALL)
    options = KINDS["eagle"][0]
    assert run(*common, *options, "--data", data) == 0
    resume = (*common, *options, "--steps", "9", "--resume", "--data")
    more = Dataset.joined([read_data(Path(data)), Dataset.of([([1, 2], [3, 4, 5])])])
    write_texts(more, tmp_path / "more")
    for other in ((str(tmp_path / "more"),), (data, "--seed", "1")):
        assert run(*resume, *other) == 1
        assert "a training on other data" in capsys.readouterr().err
    assert run(*resume, data) == 0


def test_two_processes_train_one_drafter(model_folder: str, data: str, tmp_path: Path) -> None:
    """With batches of their own and the same weights; one of them writes and prints."""
    script = tmp_path / "recorded.py"
    script.write_text(
        "import sys, torch\n"
        "from draftahead import cli\n"
        "from draftahead.train import loop\n"
        "real = loop.TrainLoop.run\n"
        "def run(self, **given):\n"
        "    found = real(self, **given)\n"
        "    sums = [int(b.tokens.sum()) for b, _ in zip(self.batches(0), range(2))]\n"
        "    state = [w.detach() for w in self.weights], sums\n"
        f"    torch.save(state, {str(tmp_path)!r} + f'/{{torch.distributed.get_rank()}}.pt')\n"
        "    return found\n"
        "loop.TrainLoop.run = run\n"
        "cli.main()\n"
    )
    out = tmp_path / "out"
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    command = ["train", "eagle", "--model", model_folder, "--data", data, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *launch, *command, *SMALL, *KINDS["eagle"][0], "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("acceptance length") == 1
    assert done.stderr.count("step 6 of 6") == 1
    (ours, our_batches), (theirs, their_batches) = (
        torch.load(tmp_path / f"{i}.pt") for i in (0, 1)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert not set(our_batches) & set(their_batches)
    start = torch.load(out / CHECKPOINT)["module"]
    assert any(not torch.equal(w, ours[0]) for w in start.values())
    assert LLM(model_folder, {"method": "eagle", "model": str(out)}).generate("w5 w6")[0].token_ids
