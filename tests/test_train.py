"""Training: texts, blocks, the unrolled chains, the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch.nn import functional as F

from draftahead.heads.eagle import EagleHead, new_head
from draftahead.train.blocks import Blocks
from draftahead.train.eagle import Chains, EagleTask, draft_vocabulary
from draftahead.train.losses import soft_cross_entropy, walked
from draftahead.train.texts import Texts

DEPTHS = (1, 2)


def some_texts(count: int = 6, seed: int = 0) -> Texts:
    generator = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(0, zoo.VOCABULARY, (size,), generator=generator).tolist()

    return Texts.of([(ids(8, 14), ids(3, 12)) for _ in range(count)])


def tiny_head(layers: int = 1) -> tuple[object, EagleHead]:
    torch.manual_seed(3)
    model = zoo.tiny("llama", dtype=torch.float32)
    tokens = torch.arange(0, zoo.VOCABULARY, 2)
    return model, new_head(model, tokens, depths=DEPTHS, layers=layers)


def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_unrolled_chains_are_what_drafting_would_compute(layers: int) -> None:
    """Every node of every chain, against the head run over that chain alone: the true pairs up to
    its start, then its own outputs."""
    model, head = tiny_head(layers)
    texts = some_texts()
    (block,) = Blocks(texts, model, DEPTHS, tokens=1000).once()
    chains = Chains(block, 3)
    found = list(chains.outputs(head, model.get_input_embeddings()))
    width = block.tokens.shape[1]
    checked = 0
    for row in range(len(block.tokens)):
        text = block.tokens[row][block.real[row]]
        told = model(text[None], output_hidden_states=True).hidden_states
        feature = head.feature(torch.stack([told[depth] for depth in DEPTHS], 2))
        embedded = model.get_input_embeddings()(text[None])
        missing = width - len(text)
        for chain in range(chains.window - 2):
            start = chains.first + chain - missing  # in the text itself
            if start < 0:
                continue
            hidden = feature[:, : start + 1]
            for depth in range(min(3, len(text) - 2 - start)):
                places = torch.arange(start + 1 + depth)[None]
                out = head(embedded[:, 1 : start + 2 + depth], hidden, places, causal)
                assert torch.allclose(out[0, -1], found[depth][row, chain], atol=1e-4)
                hidden = torch.cat([hidden, out[:, -1:]], 1)
                checked += 1
    assert checked > 100


def test_nodes_and_places_speak_of_the_same_tokens() -> None:
    """The law at a place is the target's about the very token that the node's guess is about."""
    model, _ = tiny_head()
    texts = some_texts()
    (block,) = Blocks(texts, model, DEPTHS, tokens=1000).once()
    chains = Chains(block, 3)
    rows, at = chains.places // chains.window, chains.places % chains.window
    said = chains.first + at + 1  # the token that the law at a place is about
    assert block.learnt[rows, said].all()
    assert len(rows) == int(block.learnt.sum())
    for depth in range(3):
        count = chains.window - 2 - depth
        nodes = chains.nodes(depth)
        assert torch.equal(nodes // count, rows)
        assert torch.equal(chains.first + nodes % count + 2 + depth, said)


def test_soft_cross_entropy_is_torchs_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftahead.train.losses.AT_ONCE", 3)
    torch.manual_seed(0)
    states = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    law = torch.randn(7, 11).softmax(-1)
    ours = soft_cross_entropy(states, weight, law)
    ours.backward()
    found = states.grad, weight.grad
    states.grad = weight.grad = None
    theirs = F.cross_entropy(states @ weight.T, law)
    theirs.backward()
    assert torch.allclose(ours, theirs, atol=1e-6)
    for mine, other in zip(found, (states.grad, weight.grad), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_a_walk_keeps_what_a_drafter_would() -> None:
    # Four tokens; the first chain is right twice, then wrong: three tokens, then one more pass.
    hits = torch.tensor([[[True, True, False], [False] * 3, [False] * 3, [False] * 3]])
    found = walked([(hits, [4])])
    assert found.length == 2.0
    assert found.by_depth == [0.5, 1.0, 0.0]
    # The last token can be a guess that was right: there is none of the target's own after it.
    hits = torch.tensor([[[False] * 3, [True, False, False]]])
    assert walked([(hits, [1])]).length == 1.0


def test_a_head_learns_what_its_target_says(tmp_path: Path) -> None:
    """On a few texts that the target itself wrote: acceptance rises well above chance."""
    from draftahead.train.loop import Loop, Plan

    model, _ = tiny_head()
    prompts = zoo.ragged_prompts(12)
    texts = Texts.of([(p, zoo.reference(model, p, 24)) for p in prompts])
    spoken = draft_vocabulary(texts, zoo.VOCABULARY, zoo.VOCABULARY)
    torch.manual_seed(0)
    head = new_head(model, spoken, depths=DEPTHS)
    blocks = Blocks(texts, model, DEPTHS, tokens=400, keep=10**7)
    task = EagleTask(head, model, Blocks(texts, model, DEPTHS, tokens=400), depth=3)
    before = task.evaluate().length
    plan = Plan(steps=60, rate=3e-3, warmup=5, average=0.9, every=30)
    history = Loop(task, plan, tmp_path, blocks.from_step).run()
    assert history.losses[-1] < history.losses[0]
    assert history.lengths[-1] > before + 0.5
    assert (tmp_path / "model.safetensors").exists()
