"""New draft models: layers of the target, or smaller in proportion."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead.errors import ConfigError
from draftahead.train.distill import new_draft_model


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_sliding", "gpt_neox", "smollm3", "opt"])
def test_a_draft_model_starts_as_layers_of_its_target(name: str) -> None:
    model = zoo.tiny(name, dtype=torch.float32)
    draft = new_draft_model(model, num_layers=2)
    assert draft.config.num_hidden_layers == 2
    for kind in ("layer_types", "no_rope_layers"):  # per-layer settings
        if own := getattr(model.config, kind, None):
            assert getattr(draft.config, kind) == [own[0], own[2]]
    theirs, count = model.state_dict(), 0
    for key, value in draft.state_dict().items():
        if ".1." in key:
            key, count = key.replace(".1.", ".2.", 1), count + 1  # the last of three
        assert torch.equal(value, theirs[key]), key
    assert count > 3
    whole = new_draft_model(model, num_layers=3)
    ids = torch.tensor(zoo.ragged_prompts(1))
    assert torch.allclose(whole(ids).logits, model(ids).logits, atol=1e-5)


def test_a_smaller_draft_model_keeps_the_proportions() -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    c = new_draft_model(model, num_layers=1, hidden_size=16).config
    sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    assert sizes == (16, 2, 1, 8)
    assert c.intermediate_size == 32
    c = new_draft_model(
        model, num_layers=1, hidden_size=24, intermediate_size=40, num_heads=6, num_kv_heads=3
    ).config
    sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    assert sizes == (24, 6, 3, 4)
    assert c.intermediate_size == 40
    assert c.vocab_size == zoo.VOCABULARY
    # gpt2 derives its intermediate size and has no KV heads.
    gpt2 = zoo.tiny("gpt2", dtype=torch.float32)
    ids = torch.tensor(zoo.ragged_prompts(1))
    assert (
        new_draft_model(gpt2, num_layers=1, hidden_size=16)(ids).logits.shape[-1] == zoo.VOCABULARY
    )
    with pytest.raises(ConfigError, match="leave out --intermediate-size"):
        new_draft_model(gpt2, num_layers=1, intermediate_size=16)
