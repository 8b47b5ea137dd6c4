"""Where the files of a model are: an alias, a folder, a GGUF file, or a hub id, whose files are
fetched into the cache; and what is said where they are not there or cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from draftahead.errors import (
    DamagedModelError,
    DraftaheadError,
    ModelMemoryError,
    ModelNotFoundError,
    UnsupportedModelError,
    nearest,
)
from draftahead.loader.embedded import ALIASES, ensure
from draftahead.loader.progress import ProgressCallback
from draftahead.loader.weight_files import shards_of, weight_names

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Of a hub id: fetched before the weights.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# Files in folders of a hub id: exports for other libraries. Chat templates have a folder, too.
NOT_OF_THE_MODEL = [f"*/*{suffix}" for suffix in (".json", ".txt", ".model", ".safetensors")]
PICKLED_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
HOW_TO_CONVERT = (
    "has no safetensors weights, and pickled ones are not read because they can run code; if you "
    "trust it, load it with transformers once and write it with model.save_pretrained(folder)"
)


def find(model: str | Path, progress: ProgressCallback) -> Path | str:
    """A local folder or file as a Path, or a hub id as a string."""
    if isinstance(model, str) and model in ALIASES:
        return ensure(ALIASES[model], progress)
    path = _expanded(model)
    if model and path.is_dir():
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


def check_folder(folder: Path) -> None:
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


def fetch(
    source: str, revision: str | None, patterns: Sequence[str], *, only_cached: bool = False
) -> Path:
    """The folder of a hub's files in the cache, with those that match."""
    return Path(
        snapshot_download(
            source,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=NOT_OF_THE_MODEL,
            local_files_only=only_cached,
        )
    )


def fetch_weights(source: str, revision: str | None, folder: Path, config: dict[str, Any]) -> None:
    names = weight_names(config)
    fetch(source, revision, names)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ModelNotFoundError(f"{source} {HOW_TO_CONVERT}")
    if found.suffix == ".json":
        fetch(source, revision, shards_of(found))


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
    with clear_errors(source):
        return Path(snapshot_download(source, allow_patterns=list(patterns)))


@contextmanager
def clear_errors(model: str | Path) -> Iterator[None]:
    """Turns what is raised for a model that cannot be loaded into one clear line. Files may say
    anything, so transformers, tokenizers and torch may raise anything."""
    try:
        yield
    except (DraftaheadError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except SafetensorError as error:
        raise DamagedModelError(
            f"the weights of {model} are damaged ({_first_line(error)}); download them again"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(_explain_missing(str(model), error)) from error
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own; allow that with trust_remote_code if you trust it"
        elif isinstance(error, MemoryError):
            raise ModelMemoryError(f"there is not enough memory to load {model}") from error
        elif type(error) in (ValueError, ImportError, RuntimeError, Exception):
            reason = _first_line(error)
        else:  # the text of others says too little
            reason = f"damaged or not supported ({type(error).__name__}: {_first_line(error)})"
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
    return f"cannot load {model}: {_first_line(error)}"
