"""A model's decoder layers, and forwards patched in for a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftahead.backends.cuda.hf_graph import CompiledLayers
from draftahead.backends.modules import is_patched, layers_of, patched_forwards
from draftahead.models.layer_subset import LayerSubset
from llama_shaped import llama_shaped


def test_patched_forwards_are_restored_and_a_forward_of_the_user_with_them() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def users(x: Any) -> Any:
        return x

    one.forward = users
    with patched_forwards([(one, lambda x: x + 1), (other, lambda x: x + 2)]):
        assert one(1) == 2 and other(1) == 3
    assert one.forward is users and not is_patched(other)


class Interrupting(dict[str, Any]):
    """A module's attributes, interrupted when its forward is patched."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise KeyboardInterrupt
        super().__setitem__(name, value)


PATCHES: dict[str, Callable[[Any], Any]] = {
    "layer subset": lambda model: LayerSubset(model, [0]).patched(),
    "compiled layers": lambda model: CompiledLayers(model).patched(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # of torch.compile itself
@pytest.mark.parametrize("kind", PATCHES)
def test_an_interrupt_while_patching_leaves_no_patched_forward(kind: str) -> None:
    model: Any = llama_shaped("llama")
    patch, layer = PATCHES[kind](model), model.model.layers[1]
    layer.__dict__ = Interrupting(vars(layer))
    with pytest.raises(KeyboardInterrupt), patch:
        pass
    assert not any(is_patched(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_the_layers_of_a_model_with_more_experts_than_layers_are_its_decoder_layers() -> None:
    model: Any = llama_shaped("llama")
    layers = list(model.model.layers)
    layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(len(layers) + 5))
    assert layers_of(model) == layers
    assert [layer for layer, _ in CompiledLayers(model)._forwards] == layers
