"""How a function becomes a command: options from dataclasses, and errors in the words that the user
typed.

A command takes groups of options as dataclasses: `grouped` makes each field an option of it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer import Context, Option
from typer.models import OptionInfo

from draftahead.errors import ConfigError, DraftaheadError

DRAFTER_OPTIONS = {  # keys of a drafter's configuration that are also options
    "method": "drafter",
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its dataclass parameters in place of these parameters. Errors
    that it raises name options as they are typed."""
    groups: dict[str, Any] = {n: h for n, h in get_type_hints(command).items() if is_dataclass(h)}

    def parameters_of(owner: Any) -> list[inspect.Parameter]:
        hints, found = get_type_hints(owner, include_extras=True), []
        for name, parameter in inspect.signature(owner).parameters.items():
            if is_dataclass(hints[name]):
                found += parameters_of(hints[name])
            else:
                keyword = inspect.Parameter.KEYWORD_ONLY
                found.append(parameter.replace(annotation=hints[name], kind=keyword))
        return found

    parameters = parameters_of(command) + parameters_of(_Verbosity)
    flags = {p.name: flag for p in parameters if (flag := _flag_of(p))}

    @functools.wraps(command)
    def run(verbose: bool, quiet: bool, **given: Any) -> None:
        built, typed = {}, dict(given)
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in given]
            built[name] = group, {field: given.pop(field) for field in names}
        try:
            made = {name: group(**values) for name, (group, values) in built.items()}
            command(**given, **made)
        except DraftaheadError as error:
            error.args = (_as_typed(str(error), flags, typed),)
            raise

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flag_of(parameter: inspect.Parameter) -> str | None:
    """How an option is typed; None: it is no option."""
    for info in get_args(parameter.annotation)[1:]:
        if isinstance(info, OptionInfo):
            flags = (flag for flag in info.param_decls or () if flag.startswith("--"))
            return next(flags, "--" + parameter.name.replace("_", "-")).partition("/")[0]
    return None


def check_unused(context: Context, names: Iterable[str], where: str) -> None:
    """Refuses options that were typed, but say nothing there."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} says nothing {where}: leave it out")


def _as_typed(message: str, flags: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """An error of the library in the words of the command line: `--max-tokens`, not `max_tokens`.
    Names in quotes, and those of a list of known ones, are keys of a configuration."""
    message, known, rest = message.partition(" (known: ")
    message = message.replace("lossless=False", "--not-lossless")
    names = {name: flag for name, flag in flags.items() if name != "draft_model"}  # also a drafter
    for key, name in DRAFTER_OPTIONS.items():
        if given.get("speculative_config") and given.get(name) is None:
            names.pop(name, None)  # if it was typed, then as a key of --speculative-config
        elif name in flags:
            message = re.sub(rf"\boption '{key}'", flags[name], message)
            message = re.sub(rf"\bneeds '{key}'", f"needs {flags[name]}", message)
    for name, flag in names.items():
        message = re.sub(rf"(?<![\w'-]){name}=", f"{flag} ", message)
        message = re.sub(rf"^{name}(?= (must|cannot|needs|is for|\S+ does not)\b)", flag, message)
        if "_" in name:
            message = re.sub(rf"(?<![\w'-]){name}\b(?!')", flag, message)
    return message + known + rest


def _log(level: int) -> Callable[[bool], bool]:
    def switch(on: bool) -> bool:
        if on:  # without a handler, Python prints warnings only
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
            logging.getLogger("draftahead").setLevel(level)
        return on

    return switch


Verbose = Annotated[
    bool,
    Option("--verbose", "-v", callback=_log(logging.INFO), help="Log decisions and fallbacks."),
]
Quiet = Annotated[
    bool,
    Option("--quiet", "-q", callback=_log(logging.ERROR), help="No progress, notes or warnings."),
]


@dataclass(frozen=True)
class _Verbosity:
    """Every command takes these after its name as well as before."""

    verbose: Verbose = False
    quiet: Quiet = False
