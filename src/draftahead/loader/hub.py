"""Finding and loading models: an alias, a local folder, a GGUF file, or a hub id.

Weights are read from safetensors (or GGUF) only: the older pickled formats can run code when
they are opened.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftahead.errors import (
    ConfigError,
    DraftaheadError,
    ModelNotFoundError,
    UnsupportedModelError,
    nearest,
)
from draftahead.loader.embedded import (
    ALIASES,
    Alias,
    cache_root,
    ensure,
    gguf_path,
    head_of,
    is_complete,
    model_path,
    successors_of,
)
from draftahead.loader.gguf import load_gguf_model, quiet_transformers
from draftahead.loader.progress import Report, silent, terminal_report

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ALIASES",
    "Alias",
    "ModelEntry",
    "Report",
    "cache_root",
    "catalogue",
    "ensure",
    "files_of",
    "gguf_path",
    "head_of",
    "load",
    "model_path",
    "silent",
    "successors_of",
    "terminal_report",
]

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PICKLED_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
HOW_TO_CONVERT = (
    "has no safetensors weights, and pickled ones are not read because they can run code; where "
    "you trust it, load it with transformers once and write it with model.save_pretrained(folder)"
)


@dataclass(frozen=True)
class ModelEntry:
    """One line of the list of models: where it is kept, or None, and the bytes it takes."""

    alias: str
    title: str
    path: Path | None
    size: int


def catalogue() -> list[ModelEntry]:
    """Every alias, with what of it is on the disk."""
    entries = []
    for name, alias in ALIASES.items():
        folder = model_path(alias)
        kept = [gguf_path(alias), *folder.glob("*")]
        size = sum(file.stat().st_size for file in kept if file.is_file())
        path = folder if is_complete(alias) else None
        entries.append(ModelEntry(name, alias.title, path, size))
    return entries


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    report: Report = silent,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready for inference on its device, and its tokenizer.

    A string is looked up as an alias, then as a folder or `.gguf` file, then as a hub id of the
    form `org/name`; a Path is only ever a folder or file. The default device is CUDA where there
    is one; the default dtype is float32 on the CPU and the checkpoint's own elsewhere.
    """
    place = _chosen_device(device)
    numbers = _chosen_dtype(dtype, place)
    with _failing_clearly(model):
        source = _find(model, report)
    report(f"loading {model}")
    quiet: AbstractContextManager[None]
    # Only a download from the hub has bars worth seeing; ours tell of the rest.
    downloads = isinstance(source, str) and sys.stderr.isatty()
    quiet = nullcontext() if downloads else quiet_transformers()
    with _failing_clearly(model), quiet, _without_conversion_service():
        if isinstance(source, Path) and source.is_file():
            network, tokenizer = _load_gguf(source, numbers)
        else:
            network, tokenizer = _load_pretrained(source, numbers, trust_remote_code)
    network.to(place).eval().requires_grad_(False)
    if model in ALIASES:
        network.draftahead_alias = str(model)  # whose it is: for what comes with it
    return network, tokenizer


def files_of(source: str | Path, patterns: Sequence[str]) -> Path:
    """A local folder or file as it is; of a hub id, a folder of its files that match."""
    path = Path(source)
    with suppress(RuntimeError):
        path = path.expanduser()
    if source and path.exists():
        return path
    if not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise ModelNotFoundError(
            f"{str(source)!r} is no folder or file (looked for {path.absolute()}) and no hub id of "
            "the form org/name"
        )
    from huggingface_hub import snapshot_download

    with _failing_clearly(source):
        return Path(snapshot_download(source, allow_patterns=list(patterns)))


def _chosen_device(device: str | torch.device | None) -> torch.device:
    import torch

    from draftahead.core.device import default_device, gpu_count

    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use for example cpu or cuda:0") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= gpu_count():
        raise ConfigError(f"device {device} is not there: {gpu_count()} CUDA devices are visible")
    return chosen


def _chosen_dtype(dtype: str | torch.dtype | None, place: torch.device) -> str | torch.dtype:
    import torch

    from draftahead.core.device import device_of

    if dtype is None:
        return torch.float32 if device_of(place).is_cpu else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}")
    return dtype


def _find(model: str | Path, report: Report) -> Path | str:
    """What the name means: a local folder or file as a Path, or a hub id as a string."""
    if isinstance(model, str) and model in ALIASES:
        return ensure(model, report)
    path = Path(model)
    with suppress(RuntimeError):  # no user of that name: the path is then taken as it is
        path = path.expanduser()
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
        f"no model {str(model)!r}: it is no alias, no folder or .gguf file (looked for "
        f"{path.absolute()}) and no hub id of the form org/name{nearest(str(model), ALIASES)}"
    )


def _check_folder(folder: Path) -> None:
    """Fail early, in plain words, where a folder cannot be loaded."""
    suffixes = {file.suffix for file in folder.iterdir()}
    if ".safetensors" in suffixes and (folder / "config.json").is_file():
        return
    if ".gguf" in suffixes:
        raise ModelNotFoundError(f"{folder} holds GGUF files: give the path of one of them")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is no model folder: it has no config.json")
    if suffixes.intersection(PICKLED_SUFFIXES):
        raise ModelNotFoundError(f"{folder} {HOW_TO_CONVERT}")
    raise ModelNotFoundError(f"{folder} has no weights: no .safetensors file is in it")


def _load_pretrained(
    source: Path | str, dtype: str | torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": isinstance(source, Path),
    }
    # The small files first: what is missing or not supported shows before a long download.
    config = AutoConfig.from_pretrained(source, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    network = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, use_safetensors=True, **options
    )
    return network, tokenizer


def _load_gguf(path: Path, dtype: str | torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    network = load_gguf_model(path, dtype)
    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    # Some versions of transformers leave these at defaults that are not the file's own.
    for role in ("bos", "eos", "pad"):
        token_id = getattr(network.config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    return network, tokenizer


@contextmanager
def _without_conversion_service() -> Iterator[None]:
    """Keep transformers from asking a web service to convert a repository of pickled weights.

    It would send the repository's name and the user's token there, and load what comes back.
    """
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _failing_clearly(model: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into one clear line."""
    from safetensors import SafetensorError

    try:
        yield
    except DraftaheadError:
        raise
    except SafetensorError as error:
        raise ModelNotFoundError(
            f"the weights of {model} are damaged ({_first_line(error)}); fetch them again"
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
    """One line that says why the hub, or the folder, did not give the model."""
    from huggingface_hub import errors

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(errors.GatedRepoError):
        return f"{model} is gated: accept its terms on its hub page, then run `hf auth login`"
    if caused_by(errors.RepositoryNotFoundError):
        return (
            f"no model {model!r}: it is no alias, no local folder or file, and not on the hub (a "
            f"private one needs `hf auth login`){nearest(model, ALIASES)}"
        )
    if caused_by(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        return (
            f"no model {model!r}: it is no alias, no local folder or file, not in the hub cache, "
            "and the hub cannot be reached (check the network and HF_HUB_OFFLINE)"
            f"{nearest(model, ALIASES)}"
        )
    if "use_safetensors" in str(error):
        return f"{model} {HOW_TO_CONVERT}"
    return f"cannot load {model}: {_first_line(error)}"
