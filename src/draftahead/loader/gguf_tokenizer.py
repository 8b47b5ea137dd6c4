"""The tokenizer of a GGUF file: made by transformers once, then kept in the cache folder.

Making it takes a second for 150,000 tokens, at every start. What is kept is the tokenizer of the
`tokenizers` package as JSON, and what the class of transformers around it is called with; both are
read back and compared with the original before they are kept, so a tokenizer that would come back
otherwise is made at every load.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from draftahead.loader.embedded import cache_root
from draftahead.loader.gguf_header import GgufHeader
from draftahead.loader.sources import clear_errors

log = logging.getLogger("draftahead")

# Raised when another version of this file would keep something else: older ones are left alone.
FORMAT = 1
# Tokenizers in the cache, about 5 MB each. More spare the second after many models in turn.
MAX_KEPT = 32
VOCABULARY, SETTINGS = "tokenizer.json", "settings.json"
THREAD = "draftahead tokenizer"  # which writes one
MAKING = "making-"  # prefix of folders that are being written
# What differs between a tokenizer that was made and the same one read back.
NOT_COMPARED = ("_tokenizer", "init_kwargs")


def gguf_tokenizer(path: Path, header: GgufHeader, config: Any) -> Any:
    """`config`: of the model, which names the class and the special tokens."""
    with clear_errors(f"the tokenizer in {path}"):
        kind = _class_of(path, config)
        if kind is transformers.AutoTokenizer:
            return _made(path, config, kind)
        folder = cache_root() / "tokenizers" / _key(path, header, config, kind)
        if (found := _kept(folder, path, kind)) is not None:
            return found
        tokenizer = _made(path, config, kind)
        _keep(folder, path, tokenizer)
        return tokenizer


def _made(path: Path, config: Any, kind: Any) -> Any:
    tokenizer = kind.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    # Some versions of transformers leave these at defaults that are not the file's own.
    for role, token_id in _special_ids(config).items():
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def _special_ids(config: Any) -> dict[str, Any]:
    return {role: getattr(config, f"{role}_token_id", None) for role in ("bos", "eos", "pad")}


def _class_of(path: Path, config: Any) -> Any:
    """The class that AutoTokenizer would take. It would read the whole file for it once more, which
    takes seconds; it is asked itself where files beside this one may say more."""
    if (path.parent / "tokenizer_config.json").exists():
        return transformers.AutoTokenizer
    found = TOKENIZER_MAPPING.get(type(config), transformers.PreTrainedTokenizerFast)
    is_quick = isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerFast)
    return found if is_quick else transformers.AutoTokenizer


# ------------------------------------------------------------------------------------- in the cache


def _key(path: Path, header: GgufHeader, config: Any, kind: type) -> str:
    """Of all that a tokenizer is made of: the file's metadata, the packages, and the class."""
    with path.open("rb") as file:
        metadata = file.read(max((place.stop for place in header.entries.values()), default=0))
    versions = [FORMAT, transformers.__version__, tokenizers.__version__]
    described = [*versions, f"{kind.__module__}.{kind.__qualname__}", _special_ids(config)]
    digest = hashlib.sha256(json.dumps(described, default=str).encode())
    digest.update(metadata)
    return digest.hexdigest()[:32]


def _kept(folder: Path, path: Path, kind: Any) -> Any:
    """The tokenizer in a folder, or None. A damaged one is removed."""
    if not folder.is_dir():
        return None
    try:
        settings = json.loads((folder / SETTINGS).read_text("utf-8"))
        text = (folder / VOCABULARY).read_text("utf-8")
        if settings["digest"] != _digest(text, settings["arguments"]):
            raise ValueError("it is not what was written")
        found = _read(folder, path, kind, settings["arguments"])
        os.utime(folder)  # when it was last used
        return found
    except Exception as problem:  # the text of a damaged file may be anything
        log.warning("%s is damaged, and is made again: %s", folder, problem)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _read(folder: Path, path: Path, kind: Any, arguments: str) -> Any:
    given = {**json.loads(arguments), "name_or_path": str(path.parent)}
    return kind(tokenizer_file=str(folder / VOCABULARY), **given)


class _Snapshot(NamedTuple):
    """A tokenizer as it was made: whoever gets it may change it."""

    text: str  # of the `tokenizers` package's part, as JSON
    arguments: str  # of the class of transformers around it, as JSON
    attributes: dict[str, Any]  # which it then has

    @classmethod
    def of(cls, tokenizer: Any) -> _Snapshot:
        """Raises TypeError if it has arguments that are no JSON."""
        attributes = {k: v for k, v in vars(tokenizer).items() if k not in NOT_COMPARED}
        arguments = {**tokenizer.init_kwargs, **tokenizer.special_tokens_map}
        text = tokenizer.backend_tokenizer.to_str()
        return cls(text, json.dumps(arguments), copy.deepcopy(attributes))


def _keep(folder: Path, path: Path, tokenizer: Any) -> None:
    """Writes a tokenizer to the cache, in a thread: reading it back takes a third of a second."""

    def write(made: _Snapshot) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make_room(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=MAKING) as name:
            making = Path(name) / folder.name
            making.mkdir()
            (making / VOCABULARY).write_text(made.text, "utf-8")
            settings = {"digest": _digest(made.text, made.arguments), "arguments": made.arguments}
            (making / SETTINGS).write_text(json.dumps(settings), "utf-8")
            if _Snapshot.of(_read(making, path, type(tokenizer), made.arguments)) != made:
                raise ValueError("it would be read back otherwise")
            making.rename(folder)  # at once: another process may look for it

    def run() -> None:
        try:
            write(made)
        except Exception as problem:  # transformers may raise anything
            log.info("the tokenizer of %s is not kept: %s", path.name, problem)

    try:
        made = _Snapshot.of(tokenizer)
    except TypeError as problem:
        log.info("the tokenizer of %s is not kept: %s", path.name, problem)
    else:
        threading.Thread(target=run, name=THREAD).start()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _make_room(parent: Path) -> None:
    """Removes the tokenizers that were not used for longest, and what killed processes left."""
    folders = sorted(parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[: max(0, len(folders) + 1 - MAX_KEPT)]:
        shutil.rmtree(folder, ignore_errors=True)
