"""The unrolled chains of an EAGLE training are what drafting would compute."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.train.batches import TrainBatches
from draftahead.train.eagle import unrolled
from draftahead.train.task import Chains
from eagle_heads import causal
from training import AUX_LAYERS, random_data


def tiny_head(layers: int = 1) -> tuple[object, EagleHead]:
    torch.manual_seed(3)
    model = zoo.tiny("llama", dtype=torch.float32)
    tokens = torch.arange(0, zoo.VOCABULARY, 2)
    return model, new_head(model, tokens, aux_layers=AUX_LAYERS, num_layers=layers)


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_unrolled_chains_are_what_drafting_would_compute(layers: int) -> None:
    """Every node of every chain, against the head run over that chain alone: over the text's own
    inputs up to its start, then over its own outputs."""
    model, head = tiny_head(layers)
    data = random_data()
    (batch,) = TrainBatches(data, model, AUX_LAYERS, tokens=1000)
    chains = Chains(batch, 3)
    found = list(unrolled(head, model.get_input_embeddings(), chains))
    length = batch.tokens.shape[1]
    checked = 0
    for row in range(len(batch.tokens)):
        text = batch.tokens[row][batch.attention_mask[row]]
        hidden_states = model(text[None], output_hidden_states=True).hidden_states
        feature = head.feature(torch.stack([hidden_states[depth] for depth in AUX_LAYERS], 2))
        embedded = model.get_input_embeddings()(text[None])
        padding = length - len(text)
        for chain in range(chains.window - 2):
            start = chains.first + chain - padding  # without the padding
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


def test_nodes_and_positions_predict_the_same_tokens() -> None:
    """The label of a position is the target's distribution of the token that the node predicts."""
    model, _ = tiny_head()
    data = random_data()
    (batch,) = TrainBatches(data, model, AUX_LAYERS, tokens=1000)
    chains = Chains(batch, 3)
    rows, at = chains.positions // chains.window, chains.positions % chains.window
    predicted = chains.first + at + 1
    assert batch.loss_mask[rows, predicted].all()
    assert len(rows) == int(batch.loss_mask.sum())
    for depth in range(3):
        count = chains.window - 2 - depth
        nodes = chains.nodes(depth)
        assert torch.equal(nodes // count, rows)
        assert torch.equal(chains.first + nodes % count + 2 + depth, predicted)
