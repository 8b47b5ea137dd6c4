"""GGUF files as ordinary transformers models: weights unpacked, tokenizer as published."""

from __future__ import annotations

import functools
import logging as stdlib_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the SmolLM2 GGUF file as safetensors, config and tokenizer into the folder."""
    import torch
    from transformers import GenerationConfig

    with quiet_transformers():
        model = load_gguf_model(gguf, torch.float32)
        tokenizer = smollm_tokenizer(gguf)
        # Written out in full, so that no default of some version changes how the model generates.
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def load_gguf_model(gguf: Path, dtype: Any) -> Any:
    """A GGUF file's model with its weights unpacked, so that it can be used and saved like any."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        local_files_only=True,
        # Left to itself, transformers keeps the blocks packed wherever it finds a kernel for them.
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain numbers now; what still calls them quantised would refuse to save them.
    leftovers = {"quantization_config": model.config}
    leftovers |= dict.fromkeys(("hf_quantizer", "quantization_method", "is_quantized"), model)
    for name, owner in leftovers.items():
        if name in vars(owner):
            delattr(owner, name)
    return model


def smollm_tokenizer(gguf: Path) -> Any:
    """SmolLM2's tokenizer, built as it was published from the tables in the GGUF file.

    The conversion in transformers loses the splitting of digits (which changes "\\n\\n1"), and
    some versions of it also get the end-of-text token wrong, so it is not used here.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def table(name: str) -> Any:
        return fields[name].tokens_in()

    tokens = table("tokenizer.ggml.tokens")
    kinds = table("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in table("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{r}_token": tokens[table(f"tokenizer.ggml.{n}_token_id")] for r, n in roles.items()},
        model_max_length=table("llama.context_length"),
        chat_template=table("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Stop the progress bars and warnings of transformers and its hub client for a while."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loader
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    levels = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    gguf_bar = getattr(gguf_loader, "tqdm", None)
    logging.set_verbosity_error()
    hub_logging.set_verbosity(stdlib_logging.ERROR)
    with warnings.catch_warnings():
        # It warns when HF_HUB_DISABLE_PROGRESS_BARS=0 keeps the bars on, as its user wants.
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
    if gguf_bar is not None:  # this bar alone does not heed the setting above
        gguf_loader.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
        if gguf_bar is not None:
            gguf_loader.tqdm = gguf_bar
