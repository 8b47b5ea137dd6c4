"""Small models in half precision whose shapes our GPU kernels support."""

from __future__ import annotations

from typing import Any

import torch
import transformers

NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
WINDOW = 40  # of mistral's attention


def untrained(kind: str, **sizes: Any) -> Any:
    """With weights as transformers draws them."""
    window = {"sliding_window": WINDOW} if kind == "mistral" else {}
    config = getattr(transformers, f"{NAMES[kind]}Config")(**(SIZES | window | sizes))
    return getattr(transformers, f"{NAMES[kind]}ForCausalLM")(config).eval()


def cuda_model(kind: str, dtype: torch.dtype, device: str = "cpu", **sizes: Any) -> Any:
    """With random weights that make texts vary, and biases."""
    return randomised(untrained(kind, **sizes)).to(device, dtype)


def randomised(module: Any, seed: int = 0) -> Any:
    """The same on every device: drawn on the CPU, in the order of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, 0.12)
            if name.endswith("bias"):
                deviation = 0.3
            parameter.copy_(mean + deviation * torch.randn(parameter.shape, generator=generator))
    return module
