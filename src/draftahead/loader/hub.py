"""Loads models: an alias, a folder, a GGUF file, or a hub id.

Weights are read from safetensors or GGUF only: pickled files can run code when they are opened.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from draftahead.core.device import default_device, device_of, gpu_count
from draftahead.errors import (
    ConfigError,
    DraftaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
    nearest,
)
from draftahead.loader.embedded import ALIASES, ensure
from draftahead.loader.gguf import load_gguf_model
from draftahead.loader.progress import ProgressCallback, no_progress, quiet_transformers

log = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PICKLED_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
# transformers changes torch's default dtype, its own verbosity and the environment while it loads.
_loading = threading.RLock()
HOW_TO_CONVERT = (
    "has no safetensors weights, and pickled ones are not read because they can run code; if you "
    "trust it, load it with transformers once and write it with model.save_pretrained(folder)"
)


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
    folder or file. The default device is CUDA if there is one; the default dtype is float32 on a
    CPU and the checkpoint's elsewhere. `revision` is a branch, tag or commit of a hub id.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    with _clear_errors(model):
        source = _find(model, progress)
        if revision is not None and isinstance(source, Path):
            raise ConfigError(f"revision is for models of a hub (org/name); {model} is none")
        progress(f"loading {model}")
        log.info("loading %s from %s: dtype %s, device %s", model, source, dtype, device)
        # transformers' own progress bars are shown for downloads from the hub only.
        is_download = isinstance(source, str) and sys.stderr.isatty()
        quiet: AbstractContextManager[None] = nullcontext() if is_download else quiet_transformers()
        with _loading, quiet, _without_conversion_service():
            if isinstance(source, Path) and source.is_file():
                network, tokenizer = _load_gguf(source, dtype)
            else:
                network, tokenizer = _load_pretrained(
                    source, dtype, revision=revision, trust_remote_code=trust_remote_code
                )
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


def _find(model: str | Path, progress: ProgressCallback) -> Path | str:
    """A local folder or file as a Path, or a hub id as a string."""
    if isinstance(model, str) and model in ALIASES:
        return ensure(ALIASES[model], progress)
    path = _expanded(model)
    if model and path.is_dir():
        _check_folder(path)
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is a file, but only .gguf files can be loaded alone")
        return path
    if isinstance(model, str) and HUB_ID.fullmatch(model):
        return model
    raise ModelNotFoundError(
        f"no model {str(model)!r}: not an alias, not a folder or .gguf file (looked for "
        f"{path.absolute()}), and not a hub id (org/name){nearest(str(model), ALIASES)}"
    )


def _expanded(path: str | Path) -> Path:
    """With ~ expanded, if there is a user of that name."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def _check_folder(folder: Path) -> None:
    """Explains why a folder cannot be loaded, before transformers tries."""
    suffixes = {file.suffix for file in folder.iterdir()}
    has_config = (folder / "config.json").is_file()
    if ".safetensors" in suffixes and has_config:
        return
    if ".gguf" in suffixes:
        raise ModelNotFoundError(f"{folder} holds GGUF files: give the path of one of them")
    if not has_config:
        raise ModelNotFoundError(f"{folder} is not a model folder: it has no config.json")
    if suffixes.intersection(PICKLED_SUFFIXES):
        raise ModelNotFoundError(f"{folder} {HOW_TO_CONVERT}")
    raise ModelNotFoundError(f"{folder} has no weights: no .safetensors file is in it")


def _load_pretrained(
    source: Path | str, dtype: str | torch.dtype, **options: Any
) -> tuple[Any, Any]:
    options["local_files_only"] = isinstance(source, Path)
    # Small files first: what is missing or not supported shows before a long download.
    config = transformers.AutoConfig.from_pretrained(source, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, use_safetensors=True, **options
    )
    return network, tokenizer


def _load_gguf(path: Path, dtype: str | torch.dtype) -> tuple[Any, Any]:
    network = load_gguf_model(path, dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    # Some versions of transformers leave these at defaults that are not the file's own.
    for role in ("bos", "eos", "pad"):
        token_id = getattr(network.config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    return network, tokenizer


def files_of(source: str | Path, patterns: Sequence[str]) -> Path:
    """A local folder or file as it is; for a hub id, a folder of its files that match."""
    path = _expanded(source)
    if source and path.exists():
        return path
    if not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise ModelNotFoundError(
            f"{str(source)!r} is no folder or file (looked for {path.absolute()}) and not a hub id "
            "(org/name)"
        )
    with _clear_errors(source):
        return Path(snapshot_download(source, allow_patterns=list(patterns)))


@contextmanager
def _without_conversion_service() -> Iterator[None]:
    """Stops transformers from asking a web service to convert a repository of pickled weights: it
    would send the repository's name and the user's token there, and load what comes back."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _clear_errors(model: str | Path) -> Iterator[None]:
    """Turns what transformers raises for a model that it cannot load into one clear line."""
    try:
        yield
    except DraftaheadError:
        raise
    except SafetensorError as error:
        raise ModelNotFoundError(
            f"the weights of {model} are damaged ({_first_line(error)}); download them again"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(_explain_missing(str(model), error)) from error
    except (ValueError, LookupError, ImportError, AttributeError, TypeError) as error:
        reason = _first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own; allow that with trust_remote_code if you trust it"
        raise UnsupportedModelError(f"cannot load {model}: {reason}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain_missing(model: str, error: OSError) -> str:
    """Why the hub, or the folder, did not give the model, in one line."""
    not_local = f"no model {model!r}: not an alias, not a local folder or file, and not"
    known = nearest(model, ALIASES)
    for cause in (error, error.__cause__):  # transformers wraps what the hub raised
        match cause:
            case hub_errors.GatedRepoError():
                return (
                    f"{model} is gated: accept its terms on its hub page, then run `hf auth login`"
                )
            case hub_errors.RepositoryNotFoundError():
                return f"{not_local} on the hub (a private one needs `hf auth login`){known}"
            case hub_errors.LocalEntryNotFoundError() | hub_errors.OfflineModeIsEnabled():
                advice = "the hub cannot be reached (check the network and HF_HUB_OFFLINE)"
                return f"{not_local} in the hub cache, and {advice}{known}"
    if "use_safetensors" in str(error):
        return f"{model} {HOW_TO_CONVERT}"
    return f"cannot load {model}: {_first_line(error)}"
