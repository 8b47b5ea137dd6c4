"""The cache of rearranged weights: made once, shared, bounded, made again where it differs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import tiny_gguf
from draftahead import LLM
from draftahead.backends.cpu import build, linear, panels
from draftahead.errors import ConfigError
from draftahead.loader.stored import (
    ACTIVATIONS,
    STORED_KINDS,
    Origin,
    StoredLinear,
    dequantize_some,
    stored_layers,
)
from llama_shaped import needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    build.library()  # which has a cache of its own
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "panels"
    wait_until_kept()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf", "Q4_K")


def wait_until_kept() -> None:
    for thread in threading.enumerate():
        if thread.name == "draftahead panels":
            thread.join()


def load(path: Path, **options: Any) -> LLM:
    llm = LLM(str(path), "none", device="cpu", max_batch=1, **options)
    wait_until_kept()
    return llm


def text(llm: LLM) -> list[int]:
    return llm.generate([[3, 4, 5, 6]], max_tokens=12, temperature=0)[0].token_ids


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*"))


def address(llm: LLM) -> int:
    layer = next(m for m in stored_layers(llm.model) if isinstance(m, StoredLinear))
    found = panels.panels_of(layer)
    assert found is not None
    return found.data_ptr()


def test_panels_are_made_once_and_mapped_by_later_loads(model: Path, cache: Path) -> None:
    first = load(model)
    (made,) = files(cache)
    time = made.stat().st_mtime_ns
    content = made.read_bytes()
    second = load(model)
    assert files(cache) == [made] and made.read_bytes() == content
    assert made.stat().st_mtime_ns > time  # when it was last used
    assert text(first) == text(second)
    mapped = Path("/proc/self/maps").read_text().count(made.name) if os.name == "posix" else 2
    assert mapped >= 2 and address(first) != address(second)


def test_each_arithmetic_reads_the_same_panels_and_float32_none(model: Path, cache: Path) -> None:
    load(model, activations="float32")
    assert files(cache) == []
    for activations in ("int24", "int8"):
        load(model, activations=activations)
    assert len(files(cache)) == 1


def test_a_file_that_changed_gets_panels_of_its_own(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    load(model)
    tiny_gguf.write(model, "Q6_K")
    changed = load(model)
    assert len(files(cache)) == 2
    assert text(changed) == text(load(tiny_gguf.write(tmp_path / "other.gguf", "Q6_K")))


def part(path: Path, kind: str = "Q4_K", name: str = "a", rows: int = 2, start: int = 0) -> Any:
    weights = torch.from_numpy(tiny_gguf.random_rows(kind, rows, 256 // STORED_KINDS[kind][0]))
    return panels._Part(StoredLinear(weights, kind, 256, origin=Origin(path, name)), start, 1)


def test_panels_are_known_by_all_that_they_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of panels serves one content only."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(bytes(1000))
    shutil.copy2(path, other)
    time = path.stat().st_mtime_ns
    key = panels._key(path, [part(path)])
    assert key == panels._key(path, [part(path)])
    differing = [
        panels._key(path, parts)
        for parts in (
            [part(path, kind="Q4_0")],  # rows of as many bytes
            [part(path, name="b")],
            [part(path, rows=3)],
            [part(path, start=64)],
            [part(path), part(path, start=64)],
        )
    ]
    assert other.stat().st_mtime_ns == time
    differing.append(panels._key(other, [part(other)]))
    os.utime(path, ns=(time, time + 1))
    differing.append(panels._key(path, [part(path)]))
    path.write_bytes(bytes(1001))
    os.utime(path, ns=(time, time))
    differing.append(panels._key(path, [part(path)]))
    path.write_bytes(bytes(1000))
    os.utime(path, ns=(time, time))
    assert panels._key(path, [part(path)]) == key
    monkeypatch.setattr(panels, "FORMAT", panels.FORMAT + 1)
    differing.append(panels._key(path, [part(path)]))
    assert len({key, *differing}) == 1 + len(differing)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_file_of_another_size_is_made_again(model: Path, cache: Path, size: int) -> None:
    expected = text(load(model))
    (made,) = files(cache)
    content = made.read_bytes()
    made.write_bytes(content[:size])
    assert text(load(model)) == expected
    assert made.read_bytes() == content


def test_what_was_used_last_stays_within_the_bound(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    (first,) = files(cache)
    monkeypatch.setattr(panels, "MAX_BYTES", int(2.5 * first.stat().st_size))
    others = [tiny_gguf.write(tmp_path / f"{i}.gguf", "Q4_K") for i in range(2)]
    load(others[0])
    (second,) = set(files(cache)) - {first}
    load(model)  # now `second` was not used for longest
    load(others[1])
    assert first in files(cache) and second not in files(cache)
    assert len(files(cache)) == 2


def test_panels_beyond_the_bound_are_in_memory(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = text(load(model))
    for file in files(cache):
        file.unlink()
    monkeypatch.setattr(panels, "MAX_BYTES", 1000)
    assert text(load(model)) == expected
    assert files(cache) == []
    assert "not kept" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text(load(model, activations="float32"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(panels.os, "posix_fallocate", full)
    assert len(text(load(model))) == len(expected)
    assert files(cache) == []


def test_panels_that_the_disk_has_no_room_for_are_in_memory(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = text(load(model, activations="float32"))
    usage = shutil.disk_usage(model.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert len(text(load(model))) == len(expected)
    assert files(cache) == []
    assert "are not kept: the disk is full" in caplog.text


def test_rows_that_are_no_part_of_a_file_stay() -> None:
    """Pages of a mapped file are given back to the system, which reads them again."""
    rows = torch.from_numpy(tiny_gguf.random_rows("Q8_0", 200, 8))
    before = rows.clone()
    for origin in (None, Origin(Path("m.gguf"), "t", is_mapped=False)):
        layer = StoredLinear(rows, "Q8_0", 256, origin=origin)
        layer.activations = "int24"
        assert panels.panels_of(layer) is not None
        assert torch.equal(rows, before)


def test_an_interrupt_leaves_nothing_behind(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(panels, "_make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(model)
    assert files(cache) == []
    assert text(load(model))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q8_0"), ("Q8_0", "Q6_K")])
def test_kinds_with_and_without_a_shared_scale_use_the_same_int8_inputs(
    tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """The scales of an input's units are shared if one of its layers needs it, wherever it is."""
    of_layer = {"ffn_gate": kinds[0], "ffn_up": kinds[1]}
    path = tiny_gguf.write(
        tmp_path / "shared.gguf",
        lambda name: next((kind for part, kind in of_layer.items() if part in name), "Q8_0"),
    )
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if "ffn_norm" in tensor.name:
            tensor.data[:32] = 0.01  # a scale of its own would be 100 times smaller
    llm = load(path, activations="int8")
    # Checked against the model's own forward, where every layer encodes its inputs by itself.
    assert llm.engine.verifier.runner.backend_choice.name == "cpu kernels"


def test_kinds_can_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    kinds = ["Q5_0", "Q8_0", "Q4_K", "Q6_K", "Q4_1", "F32", "BF16", "F16", "Q5_1", "Q4_0", "Q5_K"]
    path = tiny_gguf.write(
        tmp_path / "mixed.gguf", lambda name: kinds[sum(name.encode()) % len(kinds)], "qwen2"
    )
    widened = load(path, dtype="float32")
    for activations in ("float32", "int24"):
        stored = load(path, activations=activations)
        assert text(stored) == text(widened)
        assert stored.engine.verifier.runner.backend_choice.name == "cpu kernels"


def test_logits_in_float32_arithmetic_are_those_of_the_widened_file(model: Path) -> None:
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    stored, widened = load(model, activations="float32"), load(model, dtype="float32")
    logits = [llm.engine.verifier.runner.forward(tokens).logits for llm in (stored, widened)]
    assert torch.equal(*logits)


def test_the_arithmetic_is_that_which_was_asked_for(model: Path) -> None:
    tokens, logits = torch.tensor([[3, 4, 5, 6, 7]]), {}
    for activations in (None, *ACTIVATIONS):
        runner = load(model, activations=activations).engine.verifier.runner
        assert runner.backend_choice.name == "cpu kernels"
        logits[activations] = runner.forward(tokens).logits
    assert torch.equal(logits[None], logits["int24"])
    exact = logits["float32"]
    gaps = {a: float((logits[a] - exact).norm() / exact.norm()) for a in ("int24", "int8")}
    assert 0 < gaps["int24"] < 1e-5
    assert 1e-4 < gaps["int8"] < 0.2


def test_embeddings_are_read_by_the_kernels(model: Path) -> None:
    embedding = load(model).model.get_input_embeddings()
    assert embedding.widen is linear.widen_rows
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(embedding(ids), embedding.dequantized(ids.flatten()).view(2, 2, -1))


def test_without_kernels_torch_computes_in_float32(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text(load(model, activations="float32"))
    monkeypatch.setattr(build, "library", lambda: None)
    llm = load(model)
    layers = [m for m in stored_layers(llm.model) if isinstance(m, StoredLinear)]
    assert {layer.activations for layer in layers} == {"float32"}
    assert llm.model.get_input_embeddings().widen is dequantize_some
    assert text(llm) == expected
    with pytest.raises(ConfigError, match="needs our CPU kernels, and they are missing"):
        load(model, activations="int24")


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_weights_that_are_not_quantized_take_no_integers(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind)
    with pytest.raises(ConfigError, match="is for quantized weights"):
        load(path, activations="int8")
    load(path, activations="float32")


@pytest.mark.parametrize("activations", ["int24", "int8"])
def test_integers_are_for_quantized_weights(activations: str, model_folder: str) -> None:
    with pytest.raises(ConfigError, match="is for quantized weights"):
        LLM(model_folder, "none", device="cpu", activations=activations)


def test_an_unknown_arithmetic_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="activations must be 'float32' or 'int24' or 'int8'"):
        load(model, activations="int16")
