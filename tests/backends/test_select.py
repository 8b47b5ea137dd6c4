"""Which backend runs a model, and that `describe` tells which and why."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import zoo
from draftahead import LLM
from draftahead.backends.cpu import build
from llama_shaped import SHAPES, SIZES, llama_shaped, needs_kernels, plain_llama, runner_of

pytestmark = needs_kernels


def backend_lines(model: Any) -> list[str]:
    """What `describe` says of the backend, and of what would be faster."""
    llm = LLM(model, "none", max_batch=1)
    lines = [line for line in llm.describe() if line.startswith(("backend: ", "faster: "))]
    by_kernels = llm.engine.verifier.runner.batch_invariant
    assert lines[0].startswith("backend: cpu kernels" if by_kernels else "backend: transformers")
    return lines


@pytest.mark.parametrize("name", SHAPES)
def test_llama_shaped_models_run_by_the_kernels(name: str) -> None:
    why = "the model is llama-shaped and agrees with its own forward"
    assert backend_lines(llama_shaped(name)) == [f"backend: cpu kernels ({why})"]


@pytest.mark.parametrize("name", ["gemma2", "smollm3", "olmo2", "qwen3_moe", "phi3"])
def test_models_of_other_types_run_by_transformers(name: str) -> None:
    (line,) = backend_lines(zoo.tiny(name, dtype=torch.float32))
    assert f"no cpu kernels: model type {name} is not one of llama, mistral, " in line


def with_hook() -> Any:
    model = llama_shaped("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, out: None)
    return model


def with_another_norm() -> Any:
    """The right modules, but a forward that computes something else."""
    model = llama_shaped("llama")
    norm = type(model.model.norm)

    class Larger(norm):  # type: ignore[misc, valid-type]
        def forward(self, hidden: Any) -> Any:
            return super().forward(hidden) * 1.05

    model.model.norm.__class__ = Larger
    return model


def with_patched_norm() -> Any:
    model = llama_shaped("llama")
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden) * 1.05
    return model


# Models that only look alike, or that the kernels do not take: the reason that is told.
NOT_BY_KERNELS: dict[str, tuple[Callable[[], Any], str]] = {
    "soft-capped": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)).eval(), "model type gemma2"),
    "bfloat16": (lambda: llama_shaped("llama").bfloat16(), "the model is in bfloat16"),
    "head_dim 8": (lambda: zoo.tiny("llama", dtype=torch.float32), "head_dim 8 is not a multiple"),
    "a hook": (with_hook, "hooks or a patched forward on LlamaDecoderLayer"),
    "a patched forward": (with_patched_norm, "hooks or a patched forward on LlamaRMSNorm"),
    "another class": (with_another_norm, "Larger is not a class of transformers or torch"),
}


@pytest.mark.parametrize("kind", NOT_BY_KERNELS)
def test_describe_says_why_the_kernels_do_not_run_a_model(kind: str) -> None:
    make, reason = NOT_BY_KERNELS[kind]
    line, *faster = backend_lines(make())
    assert line.startswith("backend: transformers (no cpu kernels: ")
    assert reason in line
    expected = ["faster: load the model with dtype='float32'"] if kind == "bfloat16" else []
    assert faster == expected


def test_describe_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("DRAFTAHEAD_KERNELS", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    build.reload()
    try:
        lines = backend_lines(plain_llama(97))
    finally:
        monkeypatch.undo()
        build.reload()
    assert lines == [
        "backend: transformers (no cpu kernels: no C++ compiler (g++ or clang++) is installed)",
        "faster: install a C++ compiler (g++ or clang++)",
    ]


def test_describe_follows_a_model_that_is_changed_after_loading() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "none")
    assert any(line.startswith("backend: cpu kernels") for line in llm.describe())
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    llm.generate([1, 2, 3])
    (line,) = [line for line in llm.describe() if line.startswith("backend: ")]
    assert re.match(r"backend: transformers \(no cpu kernels: hooks or a patched forward", line)


def test_a_runner_takes_the_backend_that_is_described() -> None:
    model = llama_shaped("llama")
    assert runner_of(model).backend_choice.name == "cpu kernels"
    with_cap = runner_of(zoo.tiny("gemma2", dtype=torch.float32))
    assert with_cap.backend_choice.name == "transformers"
    assert not with_cap.batch_invariant
