"""Our CPU kernels: right, the same bits for every row, and never where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import Int8Linear, group_for, quantized, run_linear
from draftahead.models.runner import ModelRunner
from drafted import ALL, Clairvoyant

pytestmark = pytest.mark.skipif(build.library() is None, reason=str(build.problem()))
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
SHAPES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def shaped(name: str) -> Any:
    torch.manual_seed(1)
    model = SHAPES[name]().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.25 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_llama_shaped_models_run_by_the_kernels(name: str) -> None:
    """Token by token as transformers, deep in trees, over windows, in a ragged batch."""
    model, prompts = shaped(name), zoo.ragged_prompts(4)
    answers = {tuple(p): zoo.reference(model, p, 32) for p in prompts}
    llm = LLM(model, Clairvoyant(answers), max_batch=4)
    assert llm.engine.verifier.runner.batch_invariant
    outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3 for out in outs)


@pytest.mark.parametrize("name", ["gemma2", "smollm3", "olmo2", "qwen3_moe", "phi3"])
def test_other_shapes_are_left_alone(name: str) -> None:
    assert not ModelRunner(
        zoo.tiny(name, dtype=torch.float32), max_batch=1, max_context=64, scratch_entries=8
    ).batch_invariant


def test_activations_of_extreme_size() -> None:
    """Gates far below and above what an exponential can hold."""
    model = shaped("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.mul_(60)
    prompts = zoo.ragged_prompts(2)
    llm = LLM(model, "none")
    assert llm.engine.verifier.runner.batch_invariant
    expected = [zoo.reference(model, prompt, 32) for prompt in prompts]
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == expected


def test_a_model_changed_after_binding_is_noticed() -> None:
    """Its owner moves, replaces or patches weights: the text is that of the model as it is."""
    model = shaped("llama")
    llm = LLM(model, "none")
    prompt = [1, 2, 3]

    def agrees() -> bool:
        return llm.generate(prompt, GREEDY)[0].token_ids == zoo.reference(model, prompt, 32)

    assert agrees()
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[2].mlp.up_proj.weight * 1.5
    assert agrees()
    model.lm_head = torch.nn.Linear(192, 97, bias=False).requires_grad_(False)
    assert agrees()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    assert agrees()
    assert not llm.engine.verifier.runner.batch_invariant


def test_a_patched_linear_is_used_and_stays() -> None:
    model = shaped("llama")
    layer = model.model.layers[0].self_attn.q_proj
    real = layer.forward
    layer.forward = lambda x: real(x) * 1.3
    before = zoo.reference(model, [1, 2, 3], 32)
    assert LLM(model, "none").generate([1, 2, 3], GREEDY)[0].token_ids == before
    assert zoo.reference(model, [1, 2, 3], 32) == before


def test_a_model_that_only_looks_alike_is_left_alone() -> None:
    """The right parts, but a forward that does something else: found out by comparison."""
    model = shaped("llama")
    assert ModelRunner(model, max_batch=1, max_context=64, scratch_entries=8).batch_invariant
    real = model.model.norm.forward
    model.model.norm.forward = lambda x: real(x) * 1.05
    assert not ModelRunner(model, max_batch=1, max_context=64, scratch_entries=8).batch_invariant
    softcapped = Gemma2ForCausalLM(Gemma2Config(**SIZES)).eval()
    assert not ModelRunner(
        softcapped, max_batch=1, max_context=64, scratch_entries=8
    ).batch_invariant


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_bits_do_not_depend_on_the_pass(int8: bool) -> None:
    """One node, a chain, a tree, other rows, other threads: the same logits to the last bit."""
    from draftahead.backends.cpu.linear import quantize_model

    model = shaped("qwen3")
    if int8:
        quantize_model(model)
    passes = ModelRunner(model, max_batch=3, max_context=128, scratch_entries=64)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 97, (50,), generator=generator).tolist()
    for row in range(3):
        passes.prefill(row, text[row:30])
    chain = torch.tensor([text[30:50]])
    together = passes.forward(chain)[0]
    for index, token in enumerate(text[30:50]):
        assert torch.equal(passes.forward(torch.tensor([[token]]))[0, 0], together[index])
        passes.cache.tokens_in[0].append(token)
    del passes.cache.tokens_in[0][30:]
    mates = torch.randint(1, 97, (3, 11), generator=generator)
    mates[0] = chain[0, :11]
    assert torch.equal(passes.forward(mates)[0], together[:11])
    # The same path in a tree, between other branches.
    tokens = torch.tensor([[text[30], 5, text[31], 6, 7, text[32]]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2]])
    found = passes.forward(tokens, parents=parents)[0]
    assert torch.equal(found[[0, 2, 5]], together[:3])
    torch.set_num_threads(2)
    try:
        assert torch.equal(passes.forward(chain)[0], together)
    finally:
        torch.set_num_threads(1)
    # In pieces or at once: prefill leaves the same keys.
    keys = passes.cache.keys[2][0, :, :30].clone()
    passes.cache.tokens_in[0].clear()
    for end in (1, 4, 17, 30):
        passes.prefill(0, text[:end])
    assert torch.equal(passes.cache.keys[2][0, :, :30], keys)


def test_a_pass_names_the_likeliest_tokens() -> None:
    """As torch does, over widths with and without a rest; of equals the first; of NaN none."""
    from draftahead.backends.cpu.decoder import TOP

    for vocabulary in (97, 256, 700):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": vocabulary}))).eval()
        passes = ModelRunner(model, max_batch=2, max_context=64, scratch_entries=16)
        assert passes.batch_invariant
        tokens = torch.randint(0, vocabulary, (2, 9), generator=torch.Generator().manual_seed(1))
        logits = passes.forward(tokens)
        assert passes.top is not None and passes.best is not None
        assert torch.equal(passes.top, logits.topk(TOP).indices)
        assert torch.equal(passes.best, logits.argmax(-1))
        head = model.lm_head.weight
        with torch.no_grad():
            best = int(passes.best[0, 0])
            twin = (best + 31) % vocabulary
            head[twin] = head[best]
            assert int(_again(passes, tokens)[0, 0]) == min(best, twin)
            for row, odd in ((0, torch.nan), (vocabulary - 1, torch.nan), (5, torch.inf)):
                kept = head[row].clone()
                head[row] = odd
                assert (_again(passes, tokens) == -1).all()
                head[row] = kept


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "forward"])
def test_a_pass_tells_the_states_that_are_watched(kernels: bool) -> None:
    """As transformers counts them: after so many layers; after the last, behind its norm."""
    model = shaped("llama") if kernels else zoo.tiny("gpt2", dtype=torch.float32)
    layers = model.config.num_hidden_layers
    passes = ModelRunner(model, max_batch=1, max_context=64, scratch_entries=16)
    assert passes.batch_invariant == kernels
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    passes.forward(tokens)
    assert passes.cache.hidden is None
    passes.capture_hidden((layers,))
    passes.capture_hidden((1,))
    passes.forward(tokens)
    with torch.no_grad():
        told = model(tokens, output_hidden_states=True).hidden_states
    rows, slots = torch.tensor([0]), torch.arange(5)[None]
    for depths in ((1, layers), (layers, 1), (1,)):
        expected = torch.stack([told[depth] for depth in depths], 2)
        found = passes.states(depths, rows, slots)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
    for wrong in ((), (0,), (layers + 1,)):
        with pytest.raises(errors.ConfigError, match="states are there after 1 to"):
            passes.capture_hidden(wrong)


def _again(passes: ModelRunner, tokens: torch.Tensor) -> torch.Tensor:
    passes.forward(tokens)
    assert passes.best is not None
    return passes.best


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_drafter_gives_the_very_text(name: str, temperature: float) -> None:
    """float32, sampled drafts and trees included: replay costs nothing here."""
    model, prompts = shaped("llama"), zoo.ragged_prompts(3)
    sampling = SamplingParams(temperature=temperature, max_tokens=30, seed=2)
    plain = LLM(model, "none", exact="replay").generate(prompts, sampling)
    llm = LLM(model, ALL[name](model), exact="replay", max_batch=2)
    assert not llm.engine.verifier.fixed_shape
    outs = llm.generate(prompts, sampling)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 24])
@pytest.mark.parametrize(("out", "width"), [(5, 16), (48, 64), (77, 131), (200, 576)])
def test_linear(rows: int, out: int, width: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, out)
    x = torch.randn(2, rows, width)
    torch.testing.assert_close(run_linear(layer, x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 8, 20])
def test_int8_linear_is_what_its_integers_say(rows: int) -> None:
    """Against the same rounding written in torch, and near the float layer it came from."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 100)
    small, x = Int8Linear(layer), torch.randn(rows, 192)
    assert small.group == 192
    groups = x.view(rows, 1, 192)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).view(rows, 192)
    exact = rounded.double() @ small.dequantized().double().T + layer.bias.double()
    torch.testing.assert_close(small(x).double(), exact, rtol=1e-4, atol=1e-5)
    error = (small(x) - layer(x)).norm() / layer(x).norm()
    assert error < 0.01


@pytest.mark.parametrize(("width", "group"), [(64, 64), (576, 192), (1536, 256), (640, 128)])
def test_groups_divide_a_row(width: int, group: int) -> None:
    assert group_for(width) == group


def test_int8_weights_of_extreme_size() -> None:
    weight = torch.zeros(2, 128)
    weight[0, 3], weight[1, 64:] = 1e30, 1e-25
    whole, scales = quantized(weight, 64)
    back = (whole.view(2, 2, 64).float() - 128) * scales[..., None]
    torch.testing.assert_close(back.view(2, 128), weight, rtol=1e-2, atol=0)


def test_the_users_model_is_not_changed() -> None:
    model = shaped("llama")
    before = zoo.reference(model, [1, 2, 3], 16)
    llm = LLM(model, "lookup")
    llm.generate([1, 2, 3], GREEDY)
    assert zoo.reference(model, [1, 2, 3], 16) == before
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_a_compiler_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftahead.backends.cpu.linear import quantize_model

    model = shaped("llama")
    expected = LLM(model, "none").generate([1, 2, 3], GREEDY)[0].token_ids
    build._found.cache_clear(), build.library.cache_clear()
    monkeypatch.setenv("DRAFTAHEAD_KERNELS", "0")
    try:
        llm = LLM(model, "lookup")
        assert not llm.engine.verifier.runner.batch_invariant
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == expected
        with pytest.raises(errors.ConfigError, match="DRAFTAHEAD_KERNELS=0"):
            quantize_model(model)
    finally:
        build._found.cache_clear(), build.library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "message"), [("/nowhere/g++", "do not load|No such file"), ("false", "failed")]
)
def test_a_broken_compiler_is_told(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import re

    build._found.cache_clear(), build.library.cache_clear()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    try:
        assert build.library() is None
        assert re.search(message, build.problem() or "")
    finally:
        build._found.cache_clear(), build.library.cache_clear()
