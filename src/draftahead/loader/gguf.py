"""GGUF files as ordinary transformers models: dequantized weights, tokenizer as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftahead.loader.progress import quiet_transformers


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes the SmolLM2 GGUF file as safetensors, config and tokenizer into the folder."""
    import torch
    from transformers import GenerationConfig

    with quiet_transformers():
        model, _ = load_gguf_model(gguf, torch.float32)
        tokenizer = smollm_tokenizer(gguf)
        # All fields are written, so that defaults of other versions do not change generation.
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def load_gguf_model(gguf: Path, dtype: Any, config: Any = None) -> tuple[Any, dict[str, Any]]:
    """A GGUF file's model with dequantized weights, which can be used and saved like any other; and
    what transformers says about loading it. `config`: if it is known, which saves seconds."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        config=config,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the info, with their names
        # By default transformers keeps the weights quantized where it has a kernel for them.
        quantization_config=GgufConfig(dequantize=True),
    )
    # Attributes that still say "quantized" would make save_pretrained refuse.
    leftovers = {"quantization_config": model.config}
    leftovers |= dict.fromkeys(("hf_quantizer", "quantization_method", "is_quantized"), model)
    for name, owner in leftovers.items():
        if name in vars(owner):
            delattr(owner, name)
    return model, info


def smollm_tokenizer(gguf: Path) -> Any:
    """SmolLM2's tokenizer as it was published, built from the tables in the GGUF file.

    The conversion in transformers is not used: it loses the splitting of digits (which changes
    "\\n\\n1"), and some versions get the end-of-text token wrong.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def table(name: str) -> Any:
        return fields[name].contents()

    tokens = table("tokenizer.ggml.tokens")
    kinds = table("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in table("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{r}_token": tokens[table(f"tokenizer.ggml.{n}_token_id")] for r, n in roles.items()},
        model_max_length=table("llama.context_length"),
        chat_template=table("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
