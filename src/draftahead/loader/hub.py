"""Loads models and tokenizers: by an alias, a folder, a GGUF file, or a hub id.

Weights are read from safetensors or GGUF only: pickled files can run code when they are opened.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from draftahead.core.device import default_device, device_of, gpu_count
from draftahead.errors import ConfigError, DraftaheadError, ModelNotFoundError, nearest
from draftahead.loader.embedded import ALIASES
from draftahead.loader.folder_stored import FolderWeights, has_halves
from draftahead.loader.gguf import load_gguf_model
from draftahead.loader.gguf_config import GgufConfig
from draftahead.loader.gguf_stored import GgufWeights
from draftahead.loader.gguf_tokenizer import gguf_tokenizer
from draftahead.loader.preflight import (
    check_counts,
    check_gguf_layers,
    check_loaded,
    check_shapes,
    check_size,
    skeleton_of,
)
from draftahead.loader.progress import ProgressCallback, no_progress, quiet_transformers
from draftahead.loader.skeleton import NotStorableError, shapes_of
from draftahead.loader.sources import (
    SMALL_FILES,
    check_folder,
    clear_errors,
    fetch,
    fetch_weights,
    find,
)
from draftahead.loader.weight_files import Held, read_json, weights_in, weights_in_gguf

log = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
# Transformers ignores some of these if they are damaged.
JSON_OBJECTS = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    "added_tokens.json",
)
# A vocabulary, whatever the tokenizer's class.
TOKENIZER_FILE = re.compile(r"(tokenizer|tekken|vocab.*)\.json|vocab.*\.txt|.*\.(model|tiktoken)")
# transformers changes torch's default dtype and its own verbosity while it loads.
_loading = threading.RLock()


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressCallback = no_progress,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model, ready for inference on its device, and its tokenizer.

    A string is an alias, else a folder or `.gguf` file, else a hub id (`org/name`); a Path is a
    folder or file. The default device is CUDA if there is one. The default dtype is the
    checkpoint's, and on a CPU float32 over weights as they are stored: quantized, bfloat16 and
    float16 matrices stay in their files, mapped; dtype="float32" widens them instead. `revision` is
    a branch, tag or commit of a hub id.
    """
    device = resolve_device(device)
    keep_stored = dtype is None and device_of(device).is_cpu
    dtype = resolve_dtype(dtype, device)
    with clear_errors(model):
        source = find(model, progress)
        if revision is not None and isinstance(source, Path):
            raise ConfigError(f"revision is for models of a hub (org/name); {model} is none")
        progress(f"loading {model}")
        log.info("loading %s from %s: dtype %s, device %s", model, source, dtype, device)
        # Progress bars are shown for downloads from the hub only.
        is_download = isinstance(source, str) and sys.stderr.isatty()
        quiet: AbstractContextManager[None] = nullcontext() if is_download else quiet_transformers()
        with _loading, quiet:
            if isinstance(source, Path) and source.is_file():
                network, tokenizer = _load_gguf(source, dtype, keep_stored, progress)
            else:
                options = {"trust_remote_code": trust_remote_code, "keep_stored": keep_stored}
                network, tokenizer = _load_folder(source, dtype, revision, progress, **options)
        network.to(device).eval().requires_grad_(False)
    if model in ALIASES:
        network.draftahead_alias = str(model)  # by which files that the package ships are found
    return network, tokenizer


def resolve_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use for example cpu or cuda:0") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= gpu_count():
        raise ConfigError(f"device {device} does not exist: {gpu_count()} CUDA devices are visible")
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return torch.float32 if device_of(device).is_cpu else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}")
    return dtype


def _load_folder(
    source: Path | str,
    dtype: str | torch.dtype,
    revision: str | None,
    progress: ProgressCallback,
    *,
    trust_remote_code: bool,
    keep_stored: bool,
) -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or a hub id. A hub's files are fetched and then read
    like those of a folder, so that what was checked is what is loaded."""
    hub_id = source if isinstance(source, str) else None
    folder = Path(source) if hub_id is None else fetch(hub_id, revision, SMALL_FILES)
    if hub_id is None:
        check_folder(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{source} is no model of transformers: it has no config.json")
    options = {
        "trust_remote_code": trust_remote_code,
        # Code may lie in another repository.
        "local_files_only": hub_id is None or not trust_remote_code,
    }
    # Small files first: what is missing or not supported shows before a long download.
    for name in JSON_OBJECTS:
        if (folder / name).is_file():
            read_json(folder / name, dict)
    stated = read_json(folder / "config.json", dict)
    check_counts(source, stated)
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    tokenizer = _tokenizer_of(folder, options)
    if hub_id is not None:
        fetch_weights(hub_id, revision, folder, stated)
    held = weights_in(folder, stated)
    check_counts(source, stated, held)
    model = skeleton_of(config, trust_remote_code)
    network = None
    if keep_stored and has_halves(held):
        network = _over_stored(
            source, config, held, model, progress, partial(FolderWeights, folder, stated, held)
        )
    if network is None:
        check_size(source, config, held, model, dtype)
        network, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the info, with their names
            **options,
        )
        check_loaded(source, network, info)
    network.name_or_path = network.config.name_or_path = str(folder if hub_id is None else hub_id)
    return network, tokenizer


class _Weights(Protocol):
    """Tensors of files, and a model without memory that they belong to."""

    @property
    def num_bytes(self) -> int: ...

    def load(self, progress: ProgressCallback) -> Any: ...


def _over_stored(
    source: Path | str,
    config: Any,
    held: Held,
    model: Any,
    progress: ProgressCallback,
    weights_of: Callable[[Any], _Weights],
) -> Any:
    """The model over its weights as they are stored; None, with the reason in the log, if they are
    to be widened."""
    try:
        if model is None:
            raise NotStorableError("transformers cannot build it without memory")
        weights = weights_of(model)
        check_size(source, config, held, model, "float32", weight_bytes=weights.num_bytes)
        return weights.load(progress)
    except NotStorableError as reason:
        log.warning("%s is widened to float32: %s", source, reason)
        return None


def _tokenizer_of(folder: Path, options: dict[str, Any]) -> Any:
    """None for a folder without the files of one: of some classes, transformers would make an empty
    one."""
    stated = folder / "tokenizer_config.json"
    has_code = stated.is_file() and "auto_map" in read_json(stated, dict)
    if not has_code and not any(TOKENIZER_FILE.fullmatch(file.name) for file in folder.iterdir()):
        log.warning("%s has no tokenizer: it takes token ids, and no text", folder)
        return None
    with clear_errors(f"the tokenizer in {folder}"):
        return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _load_gguf(
    path: Path, dtype: str | torch.dtype, keep_stored: bool, progress: ProgressCallback
) -> tuple[Any, Any]:
    held, header = weights_in_gguf(path)
    check_counts(path, header.metadata, held)
    check_gguf_layers(path, header.metadata, held)
    settings = GgufConfig(path, header)
    config, model, network = settings.config, skeleton_of(settings.config), None
    if keep_stored:
        network = _over_stored(
            path, config, held, model, progress, partial(GgufWeights, path, header, settings)
        )
    if network is None:
        check_size(path, config, held, model, dtype)
        network, info = load_gguf_model(path, dtype, config)
        check_loaded(path, network, info)
        if model is not None:
            check_shapes(path, network, shapes_of(model))
    network.name_or_path = network.config.name_or_path = str(path)
    return network, gguf_tokenizer(path, header, network.config)


# ------------------------------------------------------------------------------- tokenizers alone


def load_tokenizer(
    name: str | Path, *, trust_remote_code: bool = False, only_cached: str | bool = False
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a model, which is named as for `load`; its weights need not be there.
    `only_cached`: asks no hub for it; a string is the commit in the cache."""
    with clear_errors(name), quiet_transformers():
        source = find(name, no_progress)
        if isinstance(source, Path) and source.is_file():
            _, header = weights_in_gguf(source)
            check_counts(source, header.metadata)
            return gguf_tokenizer(source, header, GgufConfig(source, header).config)
        if isinstance(source, Path):
            folder = source
        else:
            revision = only_cached if isinstance(only_cached, str) else None
            folder = fetch(source, revision, SMALL_FILES, only_cached=bool(only_cached))
        has_code = trust_remote_code and not only_cached
        options = {"trust_remote_code": trust_remote_code, "local_files_only": not has_code}
        tokenizer = _tokenizer_of(folder, options)
    if tokenizer is None:
        raise ModelNotFoundError(f"{name} has no tokenizer: its files are not there")
    return tokenizer


def tokenizer_of(
    model: Any, *, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase | None:
    """The tokenizer beside the files that a loaded model came from, as far as it knows them and
    they are on this machine."""
    name = getattr(model, "name_or_path", None) or getattr(model.config, "name_or_path", None)
    if not name or not isinstance(name, str | Path):
        return None
    commit = getattr(model.config, "_commit_hash", None)
    try:
        return load_tokenizer(
            name,
            trust_remote_code=trust_remote_code,
            only_cached=commit if isinstance(commit, str) else True,
        )
    except DraftaheadError as problem:
        log.info("the model takes token ids only: %s", problem)
        return None
