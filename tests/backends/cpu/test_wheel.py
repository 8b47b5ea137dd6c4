"""Wheels carry the kernels compiled: where they run, and that they need no compiler there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftahead.backends.cpu import build, compiler
from llama_shaped import needs_kernels

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "build_kernels", ROOT / "scripts/build_kernels.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(needed: str, versions: str) -> str:
    """As readelf -V -d does."""
    lines = [f" 0x0001 (NEEDED)  Shared library: [{name}]" for name in needed.split()]
    lines += [f"  0x0010:   Name: {name}  Flags: none  Version: 3" for name in versions.split()]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("needed", "versions", "tag"),
    [
        ("libc.so.6", "GLIBC_2.2.5 GLIBC_2.14", "manylinux_2_17_aarch64"),
        ("libc.so.6 libm.so.6", "GLIBC_2.9 GLIBC_2.27 GLIBC_2.3.4", "manylinux_2_27_aarch64"),
        (
            "libc.so.6 libstdc++.so.6",
            "GLIBC_2.27 GLIBCXX_3.4.9 GLIBCXX_3.4.21 CXXABI_1.3",
            "manylinux_2_27_aarch64",
        ),
        ("libc.so.6 libstdc++.so.6", "GLIBC_2.27 GLIBCXX_3.4.29", "manylinux_2_34_aarch64"),
        ("libc.so.6 libstdc++.so.6", "GLIBC_2.36 GLIBCXX_3.4.21", "manylinux_2_36_aarch64"),
    ],
)
def test_the_tag_is_that_of_the_newest_symbol(
    needed: str, versions: str, tag: str, script: ModuleType
) -> None:
    assert script.platform_tag("aarch64", described(needed, versions)) == tag


def test_libraries_that_not_every_system_has_are_refused(script: ModuleType) -> None:
    with pytest.raises(script.CannotCompileError, match="needs libgomp"):
        script.platform_tag("x86_64", described("libc.so.6 libgomp.so.1", "GLIBC_2.17"))
    with pytest.raises(script.CannotCompileError, match="newer than any"):
        script.platform_tag("x86_64", described("libstdc++.so.6", "GLIBCXX_3.4.99"))


# Compilers, as scripts of a shell, and the reason that is given.
COMPILERS = {
    "none": (None, "no C\\+\\+ compiler"),
    "of another system": (
        "echo arm64-apple-darwin23",
        "no compiled kernels for arm64-apple-darwin",
    ),
    "of another libc": ("echo x86_64-alpine-linux-musl", "no compiled kernels for x86_64-alpine"),
    "of another machine": ("echo riscv64-linux-gnu", "no compiled kernels for riscv64-linux-gnu"),
    "fails": ("echo 'disk is full' >&2; exit 1", "disk is full"),
    "compiles nothing": ("echo x86_64-linux-gnu", "No such file"),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_why_a_wheel_has_no_compiled_kernels(
    kind: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = COMPILERS[kind]
    monkeypatch.delenv("CXX", raising=False)
    if code is None:
        monkeypatch.setenv("PATH", "")
    else:
        command = tmp_path / "g++"
        command.write_text(f"#!/bin/sh\n{code}\n")
        command.chmod(0o755)
        monkeypatch.setenv("CXX", str(command))
    with pytest.raises(script.CannotCompileError, match=reason):
        script.compile_kernels(tmp_path)


PROBE = """
import os, torch
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu import build
import draftahead
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
llm = LLM(LlamaForCausalLM(config).eval(), "lookup")
(line,) = [line for line in llm.describe() if line.startswith("backend: ")]
print(draftahead.__file__)
print(line)
print(llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))[0].token_ids)
print(os.path.exists(os.environ["DRAFTAHEAD_CACHE"] + "/kernels"))
"""


def probe(python: Path, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [str(python), "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [*done.stdout.splitlines(), done.stderr]


def new_environment(folder: Path, wheel: Path) -> Path:
    """An interpreter with the wheel, and with this one's other packages behind it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([str(python), *install], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A .pth file: those of our own environment, an editable installation among them, do not count.
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return python


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="wheels with compiled kernels are for Linux")
@pytest.mark.skipif(not compiler.find(), reason="no compiler")
def test_an_installed_wheel_needs_no_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    source = tmp_path / "source"  # as a checkout: what git ignores is not in it
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
    environment = {**os.environ, "DRAFTAHEAD_WHEEL": "compiled"}
    built = subprocess.run(
        [*pip, str(source)], env=environment, capture_output=True, text=True, check=False
    )
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("hatchling cannot be fetched")
    assert built.returncode == 0, built.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux_2_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    (library,) = [name for name in names if name.endswith(".so")]
    assert library.startswith("draftahead/backends/cpu/compiled/")
    python = new_environment(tmp_path / "venv", wheel)
    cache = str(tmp_path / "cache")
    base = {"PATH": str(python.parent), "HOME": str(tmp_path), "DRAFTAHEAD_CACHE": cache}
    file, backend, tokens, compiled, errors = probe(python, base)
    assert file.startswith(str(tmp_path / "venv"))
    assert backend.startswith("backend: cpu kernels")
    assert compiled == "False"
    assert "run by torch" not in errors
    # Each instruction set of this CPU is in it.
    library_here = build.library()
    assert library_here
    for isa in library_here.compiled.draftahead_isas().decode().split():
        found = probe(python, {**base, "DRAFTAHEAD_KERNEL_ISA": isa})
        assert found[1:4] == [backend, tokens, "False"]
    # Without it, one line says that models run by torch; the text is the same.
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / library).unlink()
    _, backend, without, _, errors = probe(python, base)
    assert backend.startswith("backend: transformers (no cpu kernels: no C++ compiler")
    assert without == tokens
    assert errors.count("models on the CPU run by torch alone") == 1
