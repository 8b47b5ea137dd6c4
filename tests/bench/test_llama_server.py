"""Other engines as servers: started, asked, killed; what fails is one clear error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftahead import SamplingParams, errors
from draftahead.bench.against import OtherEngines, parse_against
from draftahead.bench.llama_server import LlamaServer
from draftahead.bench.other_engines import configurations_of
from draftahead.core.device import default_device
from fake_llama_server import executable

PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    (tmp_path / "model.gguf").touch()
    return str(tmp_path / "model.gguf")


def server(folder: Path, *arguments: str, **options: Any) -> LlamaServer:
    command = [str(executable(folder)), "-m", str(folder / "model.gguf"), *arguments]
    return LlamaServer("fake", command, engine="fake", reference="fake", **options)


def run(configuration: LlamaServer, prompts: Sequence[list[int]] = ([4, 7],)) -> Any:
    with configuration.running():
        configuration.warm_up(prompts[0])
        return configuration.run(prompts, PARAMS)


def test_an_answer_is_read(tmp_path: Path) -> None:
    outcome = run(server(tmp_path, "--spec-type", "suffix"), [[4, 7], [9]])
    assert outcome.texts == [[8] * 6, [10] * 6]
    assert outcome.tokens == 12 and outcome.stats.prompt_tokens == 3
    assert (outcome.stats.drafted, outcome.stats.accepted, outcome.stats.steps) == (12, 6, 6)
    assert outcome.stats.mean_acceptance_length == 2.0
    assert outcome.stats.decode_seconds == pytest.approx(0.02)
    assert outcome.stats.prefill_seconds == pytest.approx(0.004)
    assert outcome.seconds > 0


def test_text_counts_where_there_are_no_token_ids(tmp_path: Path) -> None:
    assert run(server(tmp_path, "--fault", "text")).texts == ["8 8 8 8 8 8"]


def test_every_run_has_a_process_of_its_own_and_none_is_left(tmp_path: Path) -> None:
    configuration, seen = server(tmp_path), []
    for _ in range(2):
        with configuration.running() as pids:
            seen += pids
            assert all(map(psutil.pid_exists, pids))
        assert not any(map(psutil.pid_exists, pids))
    assert len({*seen}) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("start", "fake ended with code 1 while loading: error: cannot load .*model.gguf"),
        ("never", "fake was not ready in 1 s: it printed nothing"),
        ("crash", r"fake ended with code 3 while answering \(.*\): error: out of luck"),
        ("hang", "fake gave no answer in 1 s"),
        ("json", "fake refused a prompt, status 200: '<html>'"),
        ("status", "fake refused a prompt, status 500: 'no room'"),
        ("keys", "no completion of a llama-server: KeyError 'predicted_n'"),
        ("cached", "fake read 1 of 2 tokens where the prompt has 2"),
    ],
)
def test_what_goes_wrong_is_said_and_nothing_is_left(
    tmp_path: Path, fault: str, message: str
) -> None:
    configuration = server(tmp_path, "--fault", fault, start_seconds=1.0, answer_seconds=1.0)
    if fault not in ("never", "hang"):
        configuration = server(tmp_path, "--fault", fault)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(errors.OtherEngineError, match=message) as raised:
        run(configuration)
    assert "\n" not in str(raised.value)
    assert psutil.Process().children(recursive=True) == before


def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    assert run(server(tmp_path, "--fault", "slow")).tokens == 6
    assert time.monotonic() - start > 0.5


def test_a_program_that_is_gone_is_an_error(tmp_path: Path) -> None:
    configuration = server(tmp_path)
    (tmp_path / "llama-server").unlink()
    with pytest.raises(errors.OtherEngineError, match="cannot run"):
        run(configuration)


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from bench.test_llama_server import server
with server(Path({folder!r})).running() as pids:
    print(*pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_server_dies_with_the_benchmark(tmp_path: Path, name: str) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(process.pid, getattr(signal, name))
    assert process.wait(20) != 0
    process.stdout.close()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.02)


# -------------------------------------------------------------------------------- --against


def parsed(gguf: str, *against: str, modes: str | None = None, draft: str | None = None) -> Any:
    chosen = None if modes is None else modes.split(",")
    return parse_against(against, chosen, gguf, draft)


def made(engines: OtherEngines, gguf: str) -> dict[str, LlamaServer]:
    found = configurations_of(engines, gguf, default_device(), 100)
    assert all(isinstance(one, LlamaServer) for one in found)
    return {one.name: one for one in found}  # type: ignore[misc]


def test_modes_are_those_that_help_lists(tmp_path: Path, gguf: str) -> None:
    program = executable(tmp_path)
    engines = parsed(gguf, f"{program} -rtr 1", draft=gguf)
    assert engines.described() == [
        {
            "name": "llama-server -rtr 1",
            "program": (str(program),),
            "arguments": ("-rtr", "1"),
            "version": "version: 7 (fake)",
        }
    ]
    found = made(engines, gguf)
    plain = "llama-server -rtr 1"
    assert list(found) == [plain, *(f"{plain}, {m}" for m in ("draft", "ngram-mod", "suffix"))]
    assert {one.reference for one in found.values()} == {plain}
    assert list(found[plain].command[-4:]) == ["--cache-ram", "0", "-rtr", "1"]
    assert list(found[f"{plain}, draft"].command[-6:-2]) == ["-md", gguf, "--spec-type", "draft"]
    assert list(found[f"{plain}, suffix"].command[-4:-2]) == ["--spec-type", "suffix"]


def test_modes_can_be_chosen(tmp_path: Path, gguf: str) -> None:
    program = executable(tmp_path)
    for modes, names in (("none", ["a"]), ("suffix", ["a", "a, suffix"])):
        assert list(made(parsed(gguf, f"a={program}", modes=modes), gguf)) == names
    both = parsed(gguf, f"a={program}", modes="draft", draft=gguf)
    assert list(made(both, gguf)) == ["a", "a, draft"]


def test_arguments_that_draft_make_one_configuration(tmp_path: Path, gguf: str) -> None:
    """Compared with the plain decoding whose arguments are the most like its own."""
    program = executable(tmp_path)
    own = f"mine={program} -rtr 1 --spec-type suffix:n_max=3,p_min=0"
    engines = parsed(gguf, f"a={program}", f"a repacked={program} -rtr 1", own, modes="none")
    found = made(engines, gguf)
    assert {name: one.reference for name, one in found.items()} == {
        "a": "a",
        "a repacked": "a repacked",
        "mine": "a repacked",
    }
    assert {one.engine for one in found.values()} == {"a"}  # one program
    assert made(parsed(gguf, own), gguf)["mine"].reference is None


def test_what_cannot_work_is_refused(tmp_path: Path, gguf: str) -> None:
    program, other = executable(tmp_path), executable(tmp_path, "true")
    other.write_text("#!/bin/sh\nexit 0\n")
    text = tmp_path / "text"
    text.touch()
    for against, message in {
        (str(tmp_path / "none"),): "there is no file",
        (str(tmp_path),): "there is no file",
        (f"~absent-user/{'x' * 5000}",): "there is no file",
        (str(text),): "not executable",
        (str(other),): "no llama-server: its --help has no --model",
        (f"{program} 'x",): "is no command: No closing quotation",
        ("a=",): "is no command: a program is missing",
        (str(program), str(program)): "names 'llama-server' twice: write NAME=PATH",
        ("llama-server",): "'transformers' or 'llama.cpp' or a path of a llama-server",
    }.items():
        with pytest.raises(errors.ConfigError, match=message):
            parsed(gguf, *against)
    for model in (str(tmp_path), "org/name", str(tmp_path / "missing.gguf")):
        with pytest.raises(errors.ConfigError, match=r"reads GGUF: .* is no \.gguf file"):
            parsed(model, str(program))
    for modes, message in (("sufix", "did you mean 'suffix'"), ("draft", "needs --draft-model")):
        with pytest.raises(errors.ConfigError, match=message):
            parsed(gguf, str(program), modes=modes)
    with pytest.raises(errors.ConfigError, match="--against-modes is for"):
        parsed(gguf, "transformers", modes="none")
