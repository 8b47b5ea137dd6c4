"""Loads models: an alias, a folder, a GGUF file, or a hub id.

Weights are read from safetensors or GGUF only: pickled files can run code when they are opened.
"""

from __future__ import annotations

import logging
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
    DamagedModelError,
    DraftaheadError,
    ModelMemoryError,
    ModelNotFoundError,
    UnsupportedModelError,
    nearest,
)
from draftahead.loader.embedded import ALIASES, ensure
from draftahead.loader.gguf import load_gguf_model
from draftahead.loader.preflight import (
    check_counts,
    check_gguf_layers,
    check_loaded,
    check_shapes,
    check_size,
)
from draftahead.loader.progress import ProgressCallback, no_progress, quiet_transformers
from draftahead.loader.weight_files import (
    read_json,
    shards_of,
    weight_names,
    weights_in,
    weights_in_gguf,
)

log = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Of a hub id: fetched before the weights.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# Files in folders of a hub id: exports for other libraries. Chat templates have a folder, too.
NOT_OF_THE_MODEL = [f"*/*{suffix}" for suffix in (".json", ".txt", ".model", ".safetensors")]
# Transformers ignores some of these if they are damaged.
JSON_OBJECTS = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    "added_tokens.json",
)
# A vocabulary, whatever the tokenizer's class.
TOKENIZER_FILE = re.compile(r"(tokenizer|tekken|vocab.*)\.json|vocab.*\.txt|.*\.(model|tiktoken)")
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
        # Progress bars are shown for downloads from the hub only.
        is_download = isinstance(source, str) and sys.stderr.isatty()
        quiet: AbstractContextManager[None] = nullcontext() if is_download else quiet_transformers()
        with _loading, quiet:
            if isinstance(source, Path) and source.is_file():
                network, tokenizer = _load_gguf(source, dtype)
            else:
                network, tokenizer = _load_folder(source, dtype, revision, trust_remote_code)
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


def _load_folder(
    source: Path | str, dtype: str | torch.dtype, revision: str | None, trust_remote_code: bool
) -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or a hub id. A hub's files are fetched and then read
    like those of a folder, so that what was checked is what is loaded."""
    hub_id = source if isinstance(source, str) else None
    folder = Path(source) if hub_id is None else _fetch(hub_id, revision, SMALL_FILES)
    if hub_id is None:
        _check_folder(folder)
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
        _fetch_weights(hub_id, revision, folder, stated)
    held = weights_in(folder, stated)
    check_counts(source, stated, held)
    check_size(source, config, held, dtype, trust_remote_code=trust_remote_code)
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
    if hub_id is not None:
        network.name_or_path = network.config.name_or_path = hub_id
    return network, tokenizer


def _fetch(
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


def _fetch_weights(source: str, revision: str | None, folder: Path, config: dict[str, Any]) -> None:
    names = weight_names(config)
    _fetch(source, revision, names)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ModelNotFoundError(f"{source} {HOW_TO_CONVERT}")
    if found.suffix == ".json":
        _fetch(source, revision, shards_of(found))


def _tokenizer_of(folder: Path, options: dict[str, Any]) -> Any:
    """None for a folder without the files of one: of some classes, transformers would make an empty
    one."""
    stated = folder / "tokenizer_config.json"
    has_code = stated.is_file() and "auto_map" in read_json(stated, dict)
    if not has_code and not any(TOKENIZER_FILE.fullmatch(file.name) for file in folder.iterdir()):
        log.warning("%s has no tokenizer: it takes token ids, and no text", folder)
        return None
    with _clear_errors(f"the tokenizer in {folder}"):
        return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _load_gguf(path: Path, dtype: str | torch.dtype) -> tuple[Any, Any]:
    held, metadata = weights_in_gguf(path)
    check_counts(path, metadata, held)
    check_gguf_layers(path, metadata, held)
    config = _gguf_config(path)
    shapes = check_size(path, config, held, dtype, trust_remote_code=False)
    network, info = load_gguf_model(path, dtype)
    check_loaded(path, network, info)
    check_shapes(path, network, shapes)
    network.name_or_path = network.config.name_or_path = str(path)
    return network, _gguf_tokenizer(path, network.config)


def _gguf_config(path: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )


def _gguf_tokenizer(path: Path, config: Any) -> Any:
    with _clear_errors(f"the tokenizer in {path}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        # Some versions of transformers leave these at defaults that are not the file's own.
        for role in ("bos", "eos", "pad"):
            token_id = getattr(config, f"{role}_token_id", None)
            if isinstance(token_id, int):
                setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


# ------------------------------------------------------------------------------- tokenizers alone


def load_tokenizer(
    name: str | Path, *, trust_remote_code: bool = False, only_cached: str | bool = False
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a model, which is named as for `load`; its weights need not be there.
    `only_cached`: asks no hub for it; a string is the commit in the cache."""
    with _clear_errors(name), quiet_transformers():
        source = _find(name, no_progress)
        if isinstance(source, Path) and source.is_file():
            _, metadata = weights_in_gguf(source)
            check_counts(source, metadata)
            return _gguf_tokenizer(source, _gguf_config(source))
        if isinstance(source, Path):
            folder = source
        else:
            revision = only_cached if isinstance(only_cached, str) else None
            folder = _fetch(source, revision, SMALL_FILES, only_cached=bool(only_cached))
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
def _clear_errors(model: str | Path) -> Iterator[None]:
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
