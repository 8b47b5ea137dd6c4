"""The compiled library: refused where its structs are not those of abi.py; without it, everything
still runs."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cpu import abi, build, compiler
from draftahead.backends.cpu.linear import quantize_model
from llama_shaped import llama_shaped, needs_kernels, runner_of

GREEDY = SamplingParams(temperature=0, max_tokens=32)
PROMPT = [1, 2, 3]


@pytest.fixture
def reloading() -> Iterator[None]:
    """The library is loaded again, and so it is afterwards."""
    build.reload()
    yield
    build.reload()


@pytest.mark.skipif(os.environ.get("DRAFTAHEAD_KERNELS") == "0", reason="switched off")
@pytest.mark.skipif(build.is_without_compiler(), reason="no compiler")
def test_with_a_compiler_the_kernels_compile_and_load() -> None:
    """Where they do not, most tests of this folder are skipped."""
    assert build.problem() is None


# ------------------------------------------------------------------------ the native boundary

HEADER = (compiler.SOURCES / "abi.h").read_text()
CPU = (compiler.SOURCES / "cpu.cpp").read_text()
FIELD = "FIELD(int64_t, kv_only)"  # of ForwardArgs


def compile_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, header: str, without: str = ""
) -> None:
    """A library with this abi.h whose functions do nothing takes the place of ours."""
    functions = [name for name in abi.FUNCTIONS if name not in ("draftahead_abi", without)]
    describe = "static const std::string text = abi_description(); return text.c_str();"
    code = "#define JOINED(name, isa) name##_##isa\n#define NAME(name, isa) JOINED(name, isa)\n"
    code += f"const char* NAME(draftahead_abi, KERNEL_ISA)() {{ {describe} }}\n"
    code += "\n".join(f"void NAME({name}, KERNEL_ISA)() {{}}" for name in functions)
    sources = folder / "csrc"
    sources.mkdir()
    (sources / "abi.h").write_text(header)
    (sources / "cpu.cpp").write_text(CPU)
    (sources / "kernels.cpp").write_text(f'#include "abi.h"\nextern "C" {{\n{code}\n}}\n')
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "FLAGS", ["-std=c++17", "-fPIC"])
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(folder))
    build.reload()


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_with_a_library_of_another_layout_the_model_runs_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_shaped("llama")
    expected = LLM(model, "none").generate(PROMPT, GREEDY)[0].token_ids
    assert HEADER.count(FIELD) == 1
    compile_library(tmp_path, monkeypatch, HEADER.replace(FIELD, "FIELD(int32_t, kv_only)"))
    assert build.library() is None
    assert not build.is_without_compiler()
    llm = LLM(model, "none")
    (line,) = [line for line in llm.describe() if line.startswith("backend: ")]
    assert line.startswith("backend: transformers (no cpu kernels: the compiled kernels have ")
    assert re.search(r"another interface: field of ForwardArgs .* is kv_only:\d+:4 in the", line)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_a_library_of_the_same_layout_is_taken_and_one_without_a_function_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    assert build.problem() is None
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    compile_library(tmp_path / "other", monkeypatch, HEADER, without="draftahead_linear")
    assert build.library() is None
    missing = "have another interface: .*undefined symbol: draftahead_linear"
    assert re.search(missing, build.problem() or "")


class Described:
    """A library that describes its constants and structs so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def draftahead_abi(self) -> bytes:
        return self.text.encode()


# How the library's description differs: a pattern and what replaces it; what the refusal says.
DIFFERENCES = {
    "another version": (
        r"ABI_VERSION 5\n",
        "ABI_VERSION 3\n",
        "ABI_VERSION is 3 in the library, 5",
    ),
    "another constant": (r"PANEL 48", "PANEL 32", "PANEL is 32 in the library, 48 in abi.py"),
    "another value of an enum": (r"NORM_EACH 1", "NORM_EACH 2", "NORM_EACH is 2 in the library, 1"),
    "a constant less": (r"MAX_CHILDREN 16\n", "", "MAX_CHILDREN is only in abi.py"),
    "a constant more": (r"^", "MAX_PARENTS 1\n", "MAX_PARENTS is only in the library"),
    "a struct less": (r"TreeArgs .*\n", "", "TreeArgs is only in abi.py"),
    "a struct more": (r"\Z", "TreeOut 8 size:0:8\n", "TreeOut is only in the library"),
    "fields exchanged": (
        r"out_features:32:8 in_features:40:8",
        "in_features:32:8 out_features:40:8",
        "Weights (name:offset:size) is in_features:32:8 in the library, out_features:32:8",
    ),
    "a field of another name": (r"kv_only", "no_head", "ForwardArgs (name:offset:size) is no_head"),
    "a field of another size": (r"(activation:\d+):8", r"\1:4", "of Model (name:offset:size)"),
    "a field of another offset": (
        r"scaling:\d+",
        "scaling:4",
        "of DecoderLayer (name:offset:size)",
    ),
    "a field less": (r"num_hidden:\d+:8 ", "", "of HeadInputs (name:offset:size)"),
    "a field more": (
        r"(ScreenedHead.*)",
        r"\1 rank:224:8",
        "ScreenedHead (name:offset:size) is rank:224:8 in the library, missing in abi.py",
    ),
    "another size of a struct": (r"ScreenedHead 224", "ScreenedHead 232", "ScreenedHead is 232 in"),
}


@needs_kernels
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_difference_of_the_layout_is_named(difference: str) -> None:
    library = build.library()
    assert library is not None
    text = library.draftahead_abi().decode()
    assert abi.mismatch(Described(text)) is None  # type: ignore[arg-type]
    pattern, replacement, message = DIFFERENCES[difference]
    other = re.sub(pattern, replacement, text, count=1)
    assert other != text
    found = abi.mismatch(Described(other))  # type: ignore[arg-type]
    assert found is not None
    assert message in found


@pytest.mark.parametrize("struct", abi.STRUCTS)
def test_the_mirrors_reject_fields_that_they_do_not_have(struct: Callable[..., Any]) -> None:
    """An attribute that is no field would be lost: the kernels would read zeros."""
    with pytest.raises(AttributeError):
        struct(no_such_field=1)


# ------------------------------------------------------------------------- the file in the cache

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "a bit flipped": lambda content: content[:3000] + bytes([content[3000] ^ 4]) + content[3001:],
}


@needs_kernels
@pytest.mark.usefixtures("reloading")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_never_loaded_and_is_compiled_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    assert not caplog.records
    (file,) = (tmp_path / "kernels").iterdir()
    content = file.read_bytes()
    file.unlink()  # not overwritten: this process has the old file mapped
    file.write_bytes(DAMAGE[damage](content))
    loaded: list[bytes] = []
    load = build.ctypes.CDLL

    def note(name: str) -> Any:
        loaded.append(Path(name).read_bytes())
        return load(name)

    monkeypatch.setattr("ctypes.CDLL", note)
    build.reload()
    assert build.library() is not None
    assert loaded[-1] == content  # before it, what finds out about the CPU
    assert DAMAGE[damage](content) not in loaded
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged: the kernels are compiled again"
    ]
    assert [one.read_bytes() for one in (tmp_path / "kernels").iterdir()] == [content]


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_processes_that_compile_at_once_get_whole_libraries_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    folder = tmp_path / "kernels"
    abandoned, recent = folder / "building-abandoned", folder / "building-recent"
    for building in (abandoned, recent):
        building.mkdir(parents=True)
        (building / "kernels.o").write_bytes(b"half of it")
    os.utime(abandoned, (time.time() - 3600, time.time() - 3600))
    command = compiler.find()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: build._library_file(command), range(2))
    assert one == other
    assert sorted(folder.iterdir()) == sorted([one, recent])
    assert build.library() is not None


# --------------------------------------------------------------------- the library of the package


def package_library(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str | None = None) -> Path:
    """The library in the cache becomes that of a wheel. No compiler is left."""
    (compiled,) = (folder / "kernels").iterdir()
    packaged = folder / "compiled"
    packaged.mkdir()
    file = packaged / compiler.named(key or compiler.sources_digest(), compiled)
    shutil.move(compiled, file)
    monkeypatch.setattr(build, "PACKAGED", packaged)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    build.reload()
    return file


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_a_packaged_library_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    package_library(tmp_path, monkeypatch)
    assert build.library() is not None
    assert build.problem() is None
    assert not caplog.records
    assert not list((tmp_path / "kernels").iterdir())


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_a_packaged_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And without a compiler one line says what follows."""
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    package_library(tmp_path, monkeypatch, key="0123456789abcdef")
    assert build.library() is None
    assert build.is_without_compiler()
    build.library()
    assert [record.getMessage() for record in caplog.records] == [
        f"models on the CPU run by torch alone, several times slower: {build.NO_COMPILER}"
    ]
    assert caplog.records[0].levelno == logging.WARNING


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_a_damaged_packaged_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    file = package_library(tmp_path, monkeypatch)
    content = file.read_bytes()
    file.unlink()  # not overwritten: this process has it mapped
    file.write_bytes(content[:-100])
    build.reload()
    assert build.library() is None
    assert caplog.records[0].getMessage() == f"{file} is damaged: the kernels are compiled instead"


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_a_packaged_library_of_another_layout_is_replaced_by_a_compiled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = os.environ["PATH"]
    other = tmp_path / "other"
    other.mkdir()
    compile_library(other, monkeypatch, HEADER.replace(FIELD, "FIELD(int32_t, kv_only)"))
    assert build.library() is None
    caplog.clear()
    package_library(other, monkeypatch)
    monkeypatch.setenv("PATH", path)
    (other / "csrc/abi.h").write_text(HEADER)
    (file,) = (other / "compiled").iterdir()
    file.rename(file.with_name(compiler.named(compiler.sources_digest(), file)))
    build.reload()
    assert build.library() is not None
    assert len(list((other / "kernels").iterdir())) == 1
    (record,) = caplog.records
    assert "is not used: the compiled kernels have another interface" in record.getMessage()


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_flags_of_the_users_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sanitizers would otherwise check nothing."""
    path = os.environ["PATH"]
    compile_library(tmp_path, monkeypatch, HEADER)
    assert build.library() is not None
    package_library(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("DRAFTAHEAD_KERNEL_FLAGS", "-DUSERS_OWN")
    build.reload()
    assert build.library() is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 1


# ----------------------------------------------------------------------------- instruction sets


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_the_best_instruction_set_is_taken_or_the_one_that_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTAHEAD_KERNEL_ISA", raising=False)
    compile_library(tmp_path, monkeypatch, HEADER)
    library = build.library()
    assert library is not None
    supported = library.compiled.draftahead_isas().decode().split()
    assert library.isa == supported[0]
    for isa in supported:
        monkeypatch.setenv("DRAFTAHEAD_KERNEL_ISA", isa)
        build.reload()
        library = build.library()
        assert library is not None
        assert library.isa == isa
    monkeypatch.setenv("DRAFTAHEAD_KERNEL_ISA", "avx1024")
    build.reload()
    assert build.library() is None
    names = ", ".join(supported)
    assert build.problem() == f"DRAFTAHEAD_KERNEL_ISA=avx1024: this CPU has {names}"


@pytest.mark.skipif(not compiler.find(), reason="no compiler")
@pytest.mark.usefixtures("reloading")
def test_a_cpu_without_vectors_has_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library(tmp_path, monkeypatch, HEADER)
    (tmp_path / "csrc/cpu.cpp").write_text(
        'extern "C" const char* draftahead_isas() { return ""; }\n'
    )
    assert build.library() is None
    assert build.problem() == "our kernels need a CPU with AVX2 or NEON"
    assert len(caplog.records) == 1


# -------------------------------------------------------------------------- without a library


@needs_kernels
@pytest.mark.usefixtures("reloading")
def test_switched_off_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_shaped("llama")
    expected = LLM(model, "none").generate(PROMPT, GREEDY)[0].token_ids
    build.reload()
    monkeypatch.setenv("DRAFTAHEAD_KERNELS", "0")
    llm = LLM(model, "lookup")
    assert not llm.engine.verifier.runner.batch_invariant
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    with pytest.raises(errors.ConfigError, match="DRAFTAHEAD_KERNELS=0"):
        quantize_model(model)


# Compilers, as scripts of a shell, and the problem that is named.
BROKEN_COMPILERS = {
    "fails": ("echo 'no space left' >&2; exit 1", "failed: no space left"),
    "fails without a word": ("exit 1", "failed: Command .* returned non-zero exit status 1"),
    "crashes": ("kill -SEGV $$", "failed: Command .* died with <Signals.SIGSEGV"),
    "hangs": ("exec sleep 60", "did not finish within 0.3 seconds"),
    "waits for input": ("read line; exit 1", "failed"),
    "writes nothing": ("exit 0", "do not load: .*cpu.so: .*No such file"),
    "writes no library": (
        'for last; do :; done; [ "$last" = --version ] || echo "not ELF" > "$last"',
        "do not load: .*kernels/.*[.]so: ",
    ),
}


@pytest.mark.usefixtures("reloading")
@pytest.mark.parametrize("kind", BROKEN_COMPILERS)
def test_a_broken_compiler_is_named_and_the_model_runs(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, message = BROKEN_COMPILERS[kind]
    command = tmp_path / "a compiler"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)  # one of them writes to its last argument, as --version
    monkeypatch.setenv("CXX", f"'{command}' --option")
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    assert build.library() is None
    assert re.search(message, build.problem() or "")
    assert not build.is_without_compiler()
    assert not runner_of(llama_shaped("llama")).batch_invariant


@pytest.mark.usefixtures("reloading")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CXX", "/nowhere/g++", "cannot be compiled: .*No such file.*nowhere"),
        ("CXX", "g++ '", "cannot be compiled: No closing quotation"),
        ("DRAFTAHEAD_KERNEL_FLAGS", "'", "cannot be compiled: No closing quotation"),
        ("DRAFTAHEAD_KERNEL_FLAGS", "-no-such-flag", "failed: .*-no-such-flag"),
        # A file: nothing can be written below it.
        ("DRAFTAHEAD_CACHE", __file__, "cannot be compiled: .*Not a directory"),
    ],
)
def test_a_wrong_setting_is_named(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, value)
    assert build.library() is None
    assert re.search(message, build.problem() or "")
    assert not build.is_without_compiler()
