"""What `--against` names, checked before anything is loaded, torch included.

A llama-server is asked by `--help` which speculative modes it has.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftahead.core.checks import Kind, choice
from draftahead.errors import ConfigError
from draftahead.loader.embedded import ALIASES

TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
KNOWN = choice(TRANSFORMERS, LLAMA_CPP) | Kind("a path of a llama-server", choice().read)
XLLAMACPP = Path(__file__).with_name("xllamacpp_server.py")
ASKING_SECONDS = 20.0  # for --help and --version: one that is slower is no llama-server
DRAFT, NO_MODES = "draft", "none"  # names of --against-modes, beside those of the servers
# Options that all of these servers have, by which they are known.
NEEDED = ("--model", "--ctx-size", "--threads", "--host", "--port")
# An argument of the user's that chooses how to draft makes the command one configuration.
DRAFTING = re.compile(
    r"--spec\b|--spec-|--draft|-draft$|-md$|--model-draft|--suffix|--lookup|-lc[sd]$"
)


@dataclass(frozen=True)
class Server:
    """A command that starts a server, and what it said of itself."""

    name: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]  # of the user's
    version: str
    help: str

    @property
    def drafts_itself(self) -> bool:
        return any(DRAFTING.match(argument) for argument in self.arguments)

    def modes(self) -> dict[str, tuple[str, ...]]:
        """The arguments of each mode that it drafts in without further files, by name."""
        if self.drafts_itself:
            return {}
        names = re.findall(r"(?<![\w-])(ngram-[a-z0-9-]+|suffix)\b", self._spec_types())
        return {name: ("--spec-type", name) for name in dict.fromkeys(names)}

    def draft_mode(self, model: str) -> tuple[str, ...]:
        kinds = re.findall(r"(?<![\w-])(draft-simple|draft)(?![\w-])", self._spec_types())
        return ("-md", model, *(("--spec-type", kinds[0]) if kinds else ()))

    def has(self, option: str) -> bool:
        return re.search(rf"(?<![\w-]){option}(?![\w-])", self.help) is not None

    def _spec_types(self) -> str:
        """What --help says of --spec-type, up to the next option."""
        return " ".join(re.findall(r"--spec-type\b.*?(?=\n {0,12}-|\Z)", self.help, re.DOTALL))


@dataclass(frozen=True)
class OtherEngines:
    """What `--against` names, checked."""

    transformers: bool = False
    servers: tuple[Server, ...] = ()
    modes: tuple[str, ...] | None = None  # of the servers; None: all
    draft_model: str | None = None  # in GGUF

    def described(self) -> list[dict[str, Any]]:
        """For the report."""
        return [
            {"name": s.name, "program": s.program, "arguments": s.arguments, "version": s.version}
            for s in self.servers
        ]


# ----------------------------------------------------------------------------------- checks


def parse_against(
    given: Sequence[str], modes: Sequence[str] | None, model: str, draft_model: str | None
) -> OtherEngines:
    """Refuses what cannot work, without loading anything. Each is a list of names, or the command
    of a llama-server: [NAME=]PATH ARGUMENTS."""
    names: list[str] = []
    commands: list[str] = []
    for value in given:
        if "/" in value or os.sep in value or "=" in value:
            commands.append(value)
        else:
            names += [KNOWN.of("--against", p.strip()) for p in value.split(",") if p.strip()]
    if (LLAMA_CPP in names or commands) and not is_gguf(model):
        name = LLAMA_CPP if LLAMA_CPP in names else "a llama-server"
        raise ConfigError(f"--against {name} reads GGUF: --model {model} is no .gguf file")
    servers = [*([_wheel()] if LLAMA_CPP in names else ()), *map(_server, commands)]
    twice = [server.name for server in servers]
    for server in servers:
        if twice.count(server.name) > 1:
            raise ConfigError(
                f"--against names {server.name!r} twice: write NAME=PATH to tell them apart"
            )
    draft = draft_model if draft_model is not None and is_gguf(draft_model) else None
    engines = OtherEngines(TRANSFORMERS in names, tuple(servers), None, draft)
    return engines if modes is None else _with_modes(engines, modes)


def is_gguf(model: str) -> bool:
    """Whether it is a file that llama.cpp reads, or an alias that has one."""
    return model in ALIASES or (model.lower().endswith(".gguf") and file_of(model).is_file())


def file_of(text: str) -> Path:
    """An absolute path; one that does not exist for what can be no path."""
    with suppress(RuntimeError, OSError, ValueError):  # no such user; too long a name
        path = Path(text).expanduser().absolute()
        path.is_file()
        return path
    return Path("missing")


def _with_modes(engines: OtherEngines, modes: Sequence[str]) -> OtherEngines:
    if not engines.servers:
        raise ConfigError("--against-modes is for llama.cpp and llama-servers in --against")
    known = {NO_MODES, DRAFT, *(mode for server in engines.servers for mode in server.modes())}
    for mode in modes:
        choice(*sorted(known)).of("--against-modes", mode)
    if DRAFT in modes and engines.draft_model is None:
        raise ConfigError("--against-modes draft needs --draft-model FILE.gguf")
    chosen = tuple(mode for mode in modes if mode != NO_MODES)
    return OtherEngines(engines.transformers, engines.servers, chosen, engines.draft_model)


def _wheel() -> Server:
    """llama.cpp as the optional package has it."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("--against llama.cpp needs: pip install xllamacpp")
    return _asked(LLAMA_CPP, (sys.executable, "-P", str(XLLAMACPP)), ())


def _server(command: str) -> Server:
    name, equals, rest = command.partition("=")
    if not equals or "/" in name or os.sep in name or " -" in name:
        name, rest = "", command
    try:
        words = shlex.split(rest, posix=os.name != "nt")
        problem = None if words else "a program is missing"
    except ValueError as error:  # a quote without its end
        problem = str(error)
    if problem is not None:
        raise ConfigError(f"--against {command!r} is no command: {problem}")
    program, *arguments = words
    path = file_of(program)
    if not path.is_file():
        raise ConfigError(f"--against: there is no file {program!r}")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"--against: {path} is not executable: chmod +x it, if it is a program")
    shown = shlex.join([path.name, *arguments])
    return _asked(name.strip() or shown, (str(path),), tuple(arguments))


def _asked(name: str, program: tuple[str, ...], arguments: tuple[str, ...]) -> Server:
    text = _output(name, [*program, "--help"])
    server = Server(
        name, program, arguments, _version(_output(name, [*program, "--version"])), text
    )
    missing = [option for option in NEEDED if not server.has(option)]
    if missing:
        last = (text.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"--against: {shlex.join(program)} is no llama-server: its --help has no {missing[0]}, "
            f"and ends with {last!r}"
        )
    return server


def _output(name: str, command: list[str]) -> str:
    try:
        found = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # where some print their version
            timeout=ASKING_SECONDS,
        )
    except subprocess.TimeoutExpired:
        problem = f"{shlex.join(command)} did not end in {ASKING_SECONDS:g} s"
        raise ConfigError(f"--against {name}: {problem}") from None
    except OSError as error:
        problem = f"cannot run {command[0]}: {error.strerror}"
        raise ConfigError(f"--against {name}: {problem}") from None
    return found.stdout.decode("utf-8", "replace")


def _version(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "version" in line.lower()), (lines or [""])[0])
