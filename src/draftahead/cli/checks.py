"""Values of options that are checked before the work: an output that cannot be written, a drafter
that does not exist."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftahead.cli.imports import importing
from draftahead.errors import ConfigError
from draftahead.loader.embedded import ALIASES

FIGURES = (".png", ".svg", ".pdf")
SOURCES = ("model", "head", "adapter")  # keys of drafters: a name or a path


def check_file(file: Path | None) -> Path | None:
    """Called before the work, so that a long run is not lost. Leaves no file behind."""
    try:
        if file is not None:
            existed = file.exists()
            file.open("a").close()
            if not existed:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return file


def check_plot_file(file: Path | None) -> Path | None:
    if file is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'draftahead[bench]'")
    if file.suffix.lower() not in FIGURES:
        raise ConfigError(f"--plot {file}: the name of a figure ends with {', '.join(FIGURES)}")
    return check_file(file)


def check_folder(folder: Path) -> None:
    """The same for a folder, which need not exist."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def check_drafter(config: Mapping[str, Any]) -> None:
    """Before the model is loaded."""
    with importing():
        from draftahead.drafters import registry

    registry.check(config)
    for key in SOURCES:
        if isinstance(source := config.get(key), str):
            check_source(source, f"drafter {config.get('method', 'draft_model')!r} needs {key!r}")


def check_source(source: str, what: str) -> None:
    """Refuses what can be no model and no head: neither a path that exists, nor a hub id."""
    from draftahead.loader.sources import HUB_ID

    path = Path(source).expanduser()
    if source not in ALIASES and not path.exists() and not HUB_ID.fullmatch(source):
        raise ConfigError(
            f"{what}: {source!r} is no folder or file (looked for {path.absolute()}) and not a hub "
            "id (org/name)"
        )


def check_text(what: str, text: str) -> None:
    """Python takes bytes of the command line that are no text for halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not UTF-8 text") from None


def json_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    return config


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_numbers(option: str, text: str) -> list[int]:
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} takes whole numbers from 1, separated by commas, not {text!r}")
    return [int(part) for part in parts]
