"""Models by alias, folder, file and hub id: what is loaded, and how."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from a_hub import put_on_hub
from draftahead.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from draftahead.loader import hub


def test_a_folder_is_loaded_for_inference(tiny_folder: Path) -> None:
    model, tokenizer = hub.load(str(tiny_folder), device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert tokenizer("w5 w7").input_ids == [5, 7]
    own, _ = hub.load(tiny_folder, device="cpu", dtype="auto")
    assert own.dtype == torch.bfloat16
    chosen, _ = hub.load(tiny_folder, device="cpu", dtype=torch.float64)
    assert chosen.dtype == torch.float64


def test_loading_writes_nothing_unless_stderr_is_a_terminal(tiny_folder: Path) -> None:
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


def test_a_hub_id_is_fetched_small_files_first_and_keeps_its_name(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "remote"
    shutil.copytree(tiny_folder, source)
    (source / "onnx").mkdir()
    (source / "onnx" / "model.safetensors").write_text("of another library")
    (source / "pytorch_model.bin").write_text("pickled")
    fetched = put_on_hub(source, monkeypatch, tmp_path / "cache")
    model, tokenizer = hub.load("org/name", revision="v2", device="cpu")
    own, _ = hub.load(tiny_folder, device="cpu")
    assert all(map(torch.equal, model.state_dict().values(), own.state_dict().values()))
    assert model.name_or_path == model.config.name_or_path == "org/name"
    assert tokenizer("w5 w7").input_ids == [5, 7]
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert fetched == [small, ["model.safetensors"]]


def test_shards_of_a_hub_id_are_those_that_its_index_names(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "remote"
    shutil.copytree(tiny_folder, source)
    model, _ = hub.load(tiny_folder, device="cpu")
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="4KB")
    shards = sorted(file.name for file in source.glob("model-*.safetensors"))
    assert len(shards) > 1
    (source / "consolidated.safetensors").write_text("the same in the layout of another library")
    fetched = put_on_hub(source, monkeypatch, tmp_path / "cache")
    found, _ = hub.load("org/name", revision="v2", device="cpu")
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    assert fetched[1:] == [["model.safetensors.index.json"], shards]


def test_a_hub_id_without_safetensors_is_explained(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "remote"
    shutil.copytree(tiny_folder, source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    fetched = put_on_hub(source, monkeypatch, tmp_path / "cache")
    with pytest.raises(ModelNotFoundError, match="org/name has no safetensors weights"):
        hub.load("org/name", revision="v2")
    assert "pytorch_model.bin" not in [name for names in fetched for name in names]
    (source / "config.json").unlink()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelNotFoundError, match=r"org/name is no model .* no config\.json"):
        hub.load("org/name", revision="v2")


class RunsCode:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_never_opened(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").unlink()
    executed = tmp_path / "executed"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(executed)))
    with pytest.raises(ModelNotFoundError, match="save_pretrained"):
        hub.load(folder)
    assert not executed.exists()


def test_remote_code_runs_only_when_trusted(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own_code"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    executed = tmp_path / "executed"
    (folder / "configuration_own.py").write_text(
        f"import pathlib\npathlib.Path({str(executed)!r}).touch()\n"
    )
    with pytest.raises(UnsupportedModelError, match="allow that with trust_remote_code"):
        hub.load(folder)
    assert not executed.exists()


def test_a_revision_of_local_files_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="revision is for models of a hub"):
        hub.load(tiny_folder, revision="main")


def test_unknown_devices_and_dtypes_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        hub.load(tiny_folder, device="gpu")
    with pytest.raises(ConfigError, match="device cuda:99 does not exist"):
        hub.load(tiny_folder, device="cuda:99")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        hub.load(tiny_folder, dtype="bfloat61")


def test_models_are_loaded_one_at_a_time(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes settings of the process meanwhile, which each load restores."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    meet, met = threading.Barrier(2), []

    def slow(*args: Any, **options: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            meet.wait(0.2)
            met.append(True)
        return load(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", slow)
    before = dict(os.environ)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: hub.load(tiny_folder, device="cpu"), range(2)))
    assert not met
    assert dict(os.environ) == before
