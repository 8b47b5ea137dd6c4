"""`draftahead train`, as a user runs it: on one process, on two, and into other servers' files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.loader import hub
from draftahead.train import gain
from draftahead.train.distill import new_student
from draftahead.train.gain import Gain
from draftahead.train.loop import CHECKPOINT, HISTORY
from draftahead.train.texts import Texts, read_answers, write_texts
from test_cli import folder, run  # noqa: F401
from test_train import own_texts


@pytest.fixture(scope="module")
def answers(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:  # noqa: F811
    """Answers of the tiny model to random prompts, by the command."""
    place, dice = tmp_path_factory.mktemp("answers"), random.Random(0)
    prompts = [[f"w{dice.randrange(97)}" for _ in range(dice.randrange(3, 9))] for _ in range(24)]
    lines = [json.dumps({"prompt": " ".join(prompt)}) for prompt in prompts]
    lines.append(json.dumps({"text": "w3 w4 w5 w6 w7 w8"}))
    (place / "prompts.jsonl").write_text("\n".join(lines))
    command = ["answers", "--prompts", str(place / "prompts.jsonl"), "--out", str(place / "out")]
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "train", *command, "--model", folder, "--max-tokens", "12") == 0
    return str(place / "out")


SMALL = ("--steps", "6", "--every", "3", "--tokens", "120", "--warmup", "2", "--rate", "0.01")
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "eagle": (("--states", "1,2", "--vocabulary", "60", "--depth", "2"), "eagle"),
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
def test_what_a_command_trains_drafts(
    kind: str,
    folder: str,  # noqa: F811
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options, method = KINDS[kind]
    out, picture = tmp_path / "out", tmp_path / "training.png"
    common = ("train", kind, "--model", folder, "--answers", answers, "--out", str(out), *SMALL)
    kept = ("--keep-states", "0.001", "--states-folder", str(tmp_path / "states"))
    assert run(monkeypatch, *common, *options, *kept, "--plot", str(picture)) == 0
    shown = capsys.readouterr()
    assert "acceptance length" in shown.out
    assert "an estimate for one text on this machine" in shown.out
    assert "step 6 of 6: loss" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "states").iterdir())
    assert json.loads((out / HISTORY).read_text())["steps"] == [3, 6]
    key = "adapter" if method == "early_exit" else "model"
    llm = LLM(folder, {"method": method, key: str(out), "num_speculative_tokens": 2})
    greedy = SamplingParams(temperature=0, max_tokens=12)
    said = llm.generate("w5 w6 w7", greedy)[0]
    assert said.stats.drafted > 0
    assert said.token_ids == LLM(folder, "none").generate("w5 w6 w7", greedy)[0].token_ids
    # Once more into the same folder only on request, and then further.
    assert run(monkeypatch, *common, *options) == 1
    assert "--resume" in capsys.readouterr().err
    assert run(monkeypatch, *common, *options, "--steps", "9", "--resume") == 0
    assert "going on from step 6" in capsys.readouterr().err


def test_export_writes_the_vocabulary(
    folder: str,  # noqa: F811
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    head, out = str(tmp_path / "head"), tmp_path / "out"
    common = ("--model", folder, "--answers", answers, "--out", head, *SMALL)
    assert run(monkeypatch, "train", "eagle", *common, *KINDS["eagle"][0]) == 0
    export = ("train", "export", "--head", head, "--model", folder, "--out")
    assert run(monkeypatch, *export, str(out)) == 0
    assert "60 rows of the vocabulary" in capsys.readouterr().out
    model, _ = hub.load(folder)
    weights = load_file(out / "model.safetensors")
    tokens = weights["d2t"] + torch.arange(60)
    expected = model.get_output_embeddings().weight[tokens].bfloat16()
    assert torch.equal(weights["lm_head.weight"], expected)
    said = json.loads((out / "config.json").read_text())["speculators_config"]
    assert said["verifier"]["name_or_path"] == folder
    assert said["proposal_methods"][0]["speculative_tokens"] == 2


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no answers": (("medusa", "--answers", "nowhere"), "nowhere holds no answers"),
    "no such layer": (("eagle", "--states", "1,9"), "after 1 to 3 layers, not [1, 9]"),
    "no numbers": (("eagle", "--states", "1,x"), "--states takes whole numbers"),
    "too small": (("eagle",), "after 1 to 3 layers"),
    "rate": (("medusa", "--rate", "-1"), "rate must be above 0"),
    "layers": (("distill", "--layers", "4"), "--layers must be 1 to the target's 3, not 4"),
    "heads": (("distill", "--layers", "1", "--heads", "2"), "give --hidden as well"),
    "width": (("distill", "--layers", "1", "--hidden", "31"), "does not divide"),
    "part": (("answers", "--part", "3"), "--part is a number of a number"),
    "parts": (("answers", "--part", "3/2"), "there are parts 1 to 2"),
    "odd digits": (("answers", "--part", "²/³"), "--part is a number of a number"),
    "nothing to keep": (("medusa", "--states-folder", "x"), "give --keep-states"),
    "no folder": (("medusa", "--out", __file__), "cannot write to"),
    "nor here": (("answers", "--out", __file__), "cannot write to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str,
    folder: str,  # noqa: F811
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given, message = BAD[name]
    needed = {"--model": folder, "--out": str(tmp_path / "out")}
    needed |= {"--prompts": "x"} if given[0] == "answers" else {"--answers": answers}
    rest = [word for key, value in needed.items() if key not in given for word in (key, value)]
    assert run(monkeypatch, "train", *given, *rest) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out" / CHECKPOINT).exists()


def test_pictures_that_cannot_be_drawn_are_told_of_before_the_work(
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    common = ("train", "medusa", "--model", "no/model", "--answers", answers, "--out", "out")
    assert run(monkeypatch, *common, "--plot", str(tmp_path / "none" / "a.png")) == 1
    assert "cannot write" in capsys.readouterr().err
    assert run(monkeypatch, *common, "--heads", "0") == 2
    assert "--heads" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(monkeypatch, *common, "--plot", str(tmp_path / "a.png")) == 1
    assert "pictures need matplotlib" in capsys.readouterr().err


def test_another_models_answers_are_refused(
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small = LlamaConfig(vocab_size=40, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "m")
    zoo.tokenizer().save_pretrained(tmp_path / "m")
    out = ("--out", str(tmp_path / "out"), "--answers", answers)
    assert run(monkeypatch, "train", "medusa", "--model", str(tmp_path / "m"), *out) == 1
    assert "holds tokens that" in capsys.readouterr().err


def test_texts_to_test_on_are_looked_at_likewise(
    folder: str,  # noqa: F811
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    common = ("train", "medusa", "--model", folder, "--out", str(tmp_path / "out"))
    write_texts(Texts.of([([1, 2], [3, zoo.VOCABULARY])]), tmp_path / "others")
    assert run(monkeypatch, *common, "--answers", answers, "--held-out", str(tmp_path / "others"))
    assert "holds tokens that" in capsys.readouterr().err
    write_texts(Texts.of([([], []), ([], [])]), tmp_path / "nothing")
    assert run(monkeypatch, *common, "--answers", str(tmp_path / "nothing")) == 1
    assert "no text has an answer" in capsys.readouterr().err


def test_a_training_goes_on_with_its_own_texts_only(
    folder: str,  # noqa: F811
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Others would have another draft vocabulary, and hold out what was learnt from."""
    common = ("train", "eagle", "--model", folder, "--out", str(tmp_path / "out"), *SMALL)
    options = KINDS["eagle"][0]
    assert run(monkeypatch, *common, *options, "--answers", answers) == 0
    resume = (*common, *options, "--steps", "9", "--resume", "--answers")
    more = Texts.joined([read_answers(Path(answers)), Texts.of([([1, 2], [3, 4, 5])])])
    write_texts(more, tmp_path / "more")
    for other in ((str(tmp_path / "more"),), (answers, "--seed", "1")):
        assert run(monkeypatch, *resume, *other) == 1
        assert "a training on other texts" in capsys.readouterr().err
    assert run(monkeypatch, *resume, answers) == 0


# --------------------------------------------------------------------------- several processes


def test_two_processes_learn_as_one(folder: str, answers: str, tmp_path: Path) -> None:  # noqa: F811
    """Each with blocks of its own, both with the same weights all along; one of them speaks."""
    script = tmp_path / "noted.py"
    script.write_text(
        "import sys, torch\n"
        "from draftahead import cli\n"
        "from draftahead.train import loop\n"
        "real = loop.Loop.run\n"
        "def run(self, **given):\n"
        "    found = real(self, **given)\n"
        "    sums = [int(b.tokens.sum()) for b, _ in zip(self.blocks(0), range(2))]\n"
        "    state = [w.detach() for w in self.weights], sums\n"
        f"    torch.save(state, {str(tmp_path)!r} + f'/{{torch.distributed.get_rank()}}.pt')\n"
        "    return found\n"
        "loop.Loop.run = run\n"
        "cli.main()\n"
    )
    out = tmp_path / "out"
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    command = ["train", "eagle", "--model", folder, "--answers", answers, "--out", str(out)]
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
    (ours, our_blocks), (theirs, their_blocks) = (torch.load(tmp_path / f"{i}.pt") for i in (0, 1))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert not set(our_blocks) & set(their_blocks)
    start = torch.load(out / CHECKPOINT)["module"]
    assert any(not torch.equal(w, ours[0]) for w in start.values())
    assert LLM(folder, {"method": "eagle", "model": str(out)}).generate("w5 w6")[0].token_ids


# -------------------------------------------------------------------------- what it would bring


def test_the_estimate_is_tokens_over_time() -> None:
    found = Gain({0: 10.0, 1: 12.0, 5: 20.0})
    # One guess: 1.5 tokens for 1.2 steps; two: 1.5 + 0.4 of them for 1.4; three: 1.9 for 1.6.
    assert found.of([0.5, 0.8, 0.0])[0] == pytest.approx(1.9 / 1.4)
    assert found.of([0.5, 0.8, 0.0])[1] == 2
    assert found.of([0.1, 0.1]) == (1.0, 0)
    assert "no gain" in found.told([0.1, 0.1])
    said = found.told([0.5, 0.8, 0.0])
    assert "an estimate" in said
    assert "1.36 times as fast as plain decoding, with chains of 2" in said


def test_steps_are_measured_with_the_drafter_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    texts = own_texts(model, 5)
    asked: list[tuple[int, list[list[int]]]] = []
    real = gain._step

    def noting(llm: LLM, prompts: list[list[int]]) -> float:
        real(llm, prompts)
        drafted = getattr(llm.engine.drafter, "count", 0)
        asked.append((drafted, prompts))
        return len(asked) * (1.0 + drafted)

    monkeypatch.setattr(gain, "_step", noting)
    found = gain.measured(model, {"method": "draft_model", "model": model}, texts, 4)
    assert [count for count, _ in asked] == [0, 1, 4] * (1 + gain.TURNS)
    prompts = [texts.text(i)[: int(texts.answers[i])].tolist() for i in range(gain.PROMPTS)]
    assert all(which == prompts for _, which in asked)
    assert found.steps == {0: 4.0, 1: 10.0, 4: 30.0}  # the quickest, the first turn aside


# ------------------------------------------------------------------------------- draft models


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_sliding", "gpt_neox", "smollm3", "opt"])
def test_a_draft_model_starts_as_layers_of_its_target(name: str) -> None:
    model = zoo.tiny(name, dtype=torch.float32)
    student = new_student(model, layers=2)
    assert student.config.num_hidden_layers == 2
    for kind in ("layer_types", "no_rope_layers"):  # what is said of every layer goes with it
        if own := getattr(model.config, kind, None):
            assert getattr(student.config, kind) == [own[0], own[2]]
    theirs, count = model.state_dict(), 0
    for key, value in student.state_dict().items():
        if ".1." in key:
            key, count = key.replace(".1.", ".2.", 1), count + 1  # the last of three
        assert torch.equal(value, theirs[key]), key
    assert count > 3
    whole = new_student(model, layers=3)
    ids = torch.tensor(zoo.ragged_prompts(1))
    assert torch.allclose(whole(ids).logits, model(ids).logits, atol=1e-5)


def test_a_narrower_draft_model_keeps_the_proportions() -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    c = new_student(model, layers=1, hidden=16).config
    sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    assert sizes == (16, 2, 1, 8)
    assert c.intermediate_size == 32
    c = new_student(model, layers=1, hidden=24, inner=40, heads=6, key_heads=3).config
    sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    assert sizes == (24, 6, 3, 4)
    assert c.intermediate_size == 40
    assert c.vocab_size == zoo.VOCABULARY
    # One whose width inside follows from the other, and which has no heads for keys.
    gpt2 = zoo.tiny("gpt2", dtype=torch.float32)
    ids = torch.tensor(zoo.ragged_prompts(1))
    assert new_student(gpt2, layers=1, hidden=16)(ids).logits.shape[-1] == zoo.VOCABULARY
    with pytest.raises(errors.ConfigError, match="no --inner"):
        new_student(gpt2, layers=1, inner=16)
