"""On a CUDA device: states between the layers, and drafters that go by them. Not run in CI."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.hf_graph import GraphedForward
from draftahead.core.draft import Draft
from draftahead.drafters.eagle.cuda import Plan
from draftahead.drafters.eagle.drafter import Eagle
from draftahead.drafters.tree_builder import TreeBuilder, likeliest_part
from draftahead.models.runner import ModelRunner
from drafted import ALL, Clairvoyant, random_head
from test_ahead import Unseen
from test_gpu import DEVICE, reads_back_once, shaped, tiny

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, max_tokens=32, seed=3, ignore_eos=True)
PROMPTS = zoo.ragged_prompts(3)


@torch.no_grad()
def is_greedy(model: Any, prompt: list[int], said: list[int]) -> None:
    """Half precision has near-ties, and trees sum in another order than chains: each token must be
    as good as the best, by the model in float32, up to that rounding."""
    ids = torch.tensor([prompt + said], device=DEVICE)
    logits = copy.deepcopy(model).float()(ids).logits[0, len(prompt) - 1 : -1]
    gap = logits.max(-1).values - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert float((gap / logits.std(-1)).max()) < 0.25, gap.max()


@pytest.mark.parametrize("recorded", [False, True], ids=["kernels", "recorded"])
@torch.no_grad()
def test_states_are_those_of_the_models_own_forward(recorded: bool) -> None:
    """Watched before and after passes were recorded; chains and trees; kept paths."""
    model = tiny("gemma2", torch.float32) if recorded else shaped("qwen3", torch.bfloat16)
    passes = ModelRunner(model, max_batch=2, max_context=100, scratch_entries=64)
    kind = GraphedForward if recorded else CudaDecoder
    assert isinstance(passes._decoder, kind)
    passes.prefill(0, [5, 6, 7])
    passes.forward(torch.tensor([[8, 9]]))  # recorded without states
    passes.capture_hidden((1, 3))
    passes.capture_hidden((2,))
    text = list(range(20, 50))
    for row in range(2):
        passes.prefill(row, text)
    tree = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]] * 2)
    tokens = torch.tensor([[8, 9, 10, 11, 12, 13, 14]] * 2)
    passes.forward(tokens, parents=tree)
    passes.cache.commit([[0, 1, 4], [0, 2, 5]], [[8, 9, 12], [8, 10, 13]])
    assert passes._decoder is not None and passes._decoder.graphs.works
    for row, path in enumerate(([8, 9, 12], [8, 10, 13])):
        ids = torch.tensor([text + path], device=DEVICE)
        told = model(ids, output_hidden_states=True).hidden_states
        slots = torch.arange(len(text) + 3, device=DEVICE)[None]
        rows = torch.tensor([row], device=DEVICE)
        found = passes.states((3, 1), rows, slots)[0].float()
        # The last state is left by passes that score; the prompt's did not.
        last = model.config.num_hidden_layers == 3
        for place, depth in enumerate((3, 1)):
            part = slice(len(text), None) if depth == 3 and last else slice(None)
            there = told[depth][0, part].float()
            gap = (found[part, place] - there).norm() / there.norm()
            assert float(gap) < (1e-4 if recorded else 0.03), (row, depth)


@pytest.mark.parametrize("options", ["each", "all", "deep"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@torch.inference_mode()
def test_trees_grown_by_the_device_are_the_growers(
    sampling: SamplingParams, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to guesses that are as likely as others, after one pair and after several."""
    from draftahead.drafters.eagle.head import EagleHead, new_head

    monkeypatch.setattr("draftahead.drafters.tree_builder.MIN_CONFIDENCE", 0.0)
    model = shaped("llama", torch.float16)
    spoken = torch.arange(0, 300, 2)
    torch.manual_seed(1)
    layers = 2 if options == "deep" else 1
    head = new_head(model, spoken, depths=(1, 2, 3), layers=layers)
    if options == "all":
        c = head.config
        c.norm_each, c.norm_before_fuse, c.norm_before_residual, c.norm_output = 0, 1, 0, 1
        head = EagleHead(c).to(DEVICE)
        head.tokens.copy_(spoken)
    for parameter in head.parameters():
        parameter.normal_(float(parameter.ndim == 1), 0.12)
    head.lm_head.weight.mul_(3)  # a flat law would leave the TreeBuilder's shortlist
    llm = LLM(model, {"method": "eagle", "model": head.half()}, max_batch=3)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Eagle) and drafter.ahead
    for prompt in PROMPTS:
        llm.engine.add(llm._request(prompt, sampling))
    llm.engine._admit()
    batch = dataclasses.replace(llm.engine._batch(), step_cost=None)
    passes, plan = drafter.runner, Plan(5, 3, 4, 16, sampling is WARM)
    passes.catch_up(batch.sequences, [True] * 3)
    grower = TreeBuilder(plan.deepest, plan.a_level)
    logits = passes.logits[:, 0]
    grown = grower.grow(batch, logits, drafter._expand, [32] * 3, drafter._spoken)
    assert grown is not None
    theirs = likeliest_part(grown, batch.roots, plan.size - 1)
    for lacking in (1, 1, 5):
        for held in passes.cache.tokens_in:
            del held[max(0, len(held) - lacking) :]
        ours = passes.ahead(batch, [True] * 3, plan)
        assert ours is not None
        for row in range(3):
            common = paths(ours, row) & paths(theirs, row)
            assert len(common) >= 14, (row, lacking)


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, draft.num_nodes[row]):
        found.append((*found[draft.parents[row][node]], draft.tokens[row][node]))
    return set(found)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(
    "drafter",
    [
        "eagle_guided",
        "eagle_tree",
        "auto_eagle",
        "medusa_guided",
        "medusa_tree",
        "early_exit_guided",
        "layer_skip_guided",
    ],
)
def test_texts_are_those_of_plain_decoding(drafter: str, sampling: SamplingParams) -> None:
    """In float32, where a near-tie is rare."""
    model = tiny("llama", torch.float32)
    plain = LLM(model, "none", max_batch=3).generate(PROMPTS, sampling)
    outs = LLM(model, ALL[drafter](model), max_batch=3).generate(PROMPTS, sampling)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", ["eagle", "eagle_guided", "eagle_tree", "auto_eagle"])
@pytest.mark.parametrize("batch", [1, 4, 12])
def test_trees_ahead_keep_the_text(drafter: str, batch: int) -> None:
    model = shaped("llama", torch.bfloat16)
    prompts = [*PROMPTS, [7], [5, 6], *([3, 1 + i] * 4 for i in range(batch))]
    llm = LLM(model, ALL[drafter](model), max_batch=batch)
    outs = llm.generate(prompts, GREEDY)
    assert sum(out.stats.drafted for out in outs) > 50
    for prompt, out in zip(prompts, outs, strict=True):
        is_greedy(model, prompt, out.token_ids)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("spoils", [False, True])
def test_trees_nobody_has_looked_at(spoils: bool) -> None:
    """Right ones are accepted, out of the order of slots; spoilt ones cost their guesses alone."""
    model = shaped("llama", torch.bfloat16)
    plain = LLM(model, "none", max_batch=3).generate(PROMPTS, GREEDY)
    answers = {tuple(p): out.token_ids for p, out in zip(PROMPTS, plain, strict=True)}
    for other in (Clairvoyant(answers), ALL["garbage_tree"](model)):
        drafter = Unseen(other, spoils=spoils, device=DEVICE)
        outs = LLM(model, drafter, max_batch=3).generate(PROMPTS, GREEDY)
        assert drafter.steps
        for prompt, out in zip(PROMPTS, outs, strict=True):
            is_greedy(model, prompt, out.token_ids)
        if isinstance(other, Clairvoyant) and not spoils:
            assert sum(out.stats.accepted for out in outs) > sum(out.stats.steps for out in outs)


@pytest.mark.usefixtures("generous_policy")
def test_sampled_texts_are_nearly_those_of_plain_decoding() -> None:
    """For a seed, up to near-ties of half precision."""
    model = shaped("llama", torch.bfloat16)
    prompts = [[*prompt, extra] for prompt in PROMPTS for extra in range(4)]
    plain = LLM(model, "none", max_batch=4).generate(prompts, WARM)
    outs = LLM(model, ALL["eagle_guided"](model), max_batch=4).generate(prompts, WARM)
    same = sum(a.token_ids[:6] == b.token_ids[:6] for a, b in zip(plain, outs, strict=True))
    assert same >= 9


@pytest.mark.usefixtures("generous_policy")
def test_a_step_with_a_tree_ahead_reads_back_once() -> None:
    model = shaped("llama", torch.bfloat16)
    llm = LLM(model, {"method": "eagle", "model": random_head(model)}, max_batch=2)
    reads_back_once(llm, PROMPTS[:2], GREEDY)


@pytest.mark.parametrize("kind", ["kernels", "recorded"])
def test_prompts_are_filled_by_recordings(kind: str) -> None:
    """Into whatever row, and as by the model's own forward."""
    model = tiny("gemma2", torch.float32) if kind == "recorded" else shaped("llama", torch.bfloat16)
    both = []
    for recorded in (False, True):
        passes = ModelRunner(model, max_batch=3, max_context=100, scratch_entries=64)
        assert passes._fill is not None
        if not recorded:
            passes._fill = None
        passes.capture_hidden((1, 2))
        for row, length in ((0, 5), (1, 37), (2, 39), (0, 60), (1, 88)):
            passes.prefill(row, [(7 * row + 3 * i) % 90 for i in range(length)])
        if passes._fill is not None:
            assert len(passes._fill.graphs) == 2 and passes._fill.graphs.works
        both.append(passes.cache)
    for row, held in enumerate(both[0].tokens_in):
        for eager, filled in zip(both[0].stored(), both[1].stored(), strict=True):
            one, other = (x[:, row, :, : len(held)].float() for x in (eager, filled))
            assert float((one - other).norm() / one.norm()) < (1e-4 if kind == "recorded" else 0.02)
