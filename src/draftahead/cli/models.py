"""`draftahead models`: the models at hand; and how a model would run on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer
from typer import Argument, Context, Option

from draftahead.cli import command, options
from draftahead.errors import ConfigError
from draftahead.loader.embedded import ALIASES


@dataclass(frozen=True)
class CheckOptions(options.LLMOptions):
    """For --check."""

    model: Annotated[str | None, Argument(help="For --check; unset: smollm2.")] = None  # type: ignore[assignment]


@command.grouped
def models(
    context: Context,
    chosen: CheckOptions,
    check: Annotated[
        bool, Option("--check", help="Load MODEL and print which backend runs it, and why.")
    ] = False,
) -> None:
    """List the models at hand; or check how one would run.

    At hand are the aliases, and what the cache of the Hugging Face hub holds. All options are for
    --check.
    """
    if check:
        loaded = replace(chosen, model=chosen.model or "smollm2").build("none")
        typer.echo("\n".join(loaded.describe()))
        return
    if chosen.model is not None:
        raise ConfigError(f"to check how a model would run, add --check to {chosen.model}")
    command.check_unused(context, vars(chosen), "without --check")
    for alias in ALIASES.values():
        where = str(alias.folder) if alias.is_complete() else "not downloaded yet"
        typer.echo(f"{alias.name}: {alias.title}, {_size(alias.bytes_on_disk)}, {where}")
    for name, size, folder in _of_the_hub_cache():
        typer.echo(f"{name}: {_size(size)}, {folder}")
    typer.echo("Any other model: a hub id (org/name), a folder, or a .gguf file.")


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _of_the_hub_cache() -> list[tuple[str, int, str]]:
    """Id, bytes and folder of each model."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    kept = [repo for repo in found if repo.repo_type == "model"]
    return sorted((repo.repo_id, repo.size_on_disk, str(repo.repo_path)) for repo in kept)
