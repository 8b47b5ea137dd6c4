"""Configurations of other engines: each mode of a llama-server, beside its plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from draftahead.backends.cpu.threads import num_threads
from draftahead.bench.against import DRAFT, TRANSFORMERS, OtherEngines, Server, file_of
from draftahead.bench.configurations import Configuration, Transformers
from draftahead.bench.llama_server import LlamaServer
from draftahead.loader.embedded import ALIASES, ensure
from draftahead.loader.hub import load, resolve_dtype
from draftahead.loader.progress import ProgressCallback, no_progress

CONTEXT_MARGIN = 256  # tokens beyond prompt and text, for drafts at the end of a text


def configurations_of(
    engines: OtherEngines,
    model: str,
    device: torch.device,
    context: int,
    progress: ProgressCallback = no_progress,
) -> list[Configuration]:
    """Of all engines, on the same model."""
    found: list[Configuration] = []
    if engines.transformers:
        # Loaded again: our model may be quantized, and its attention function is replaced.
        own = load(model, dtype=resolve_dtype(None, device), device=device)[0]
        look_up = Transformers("transformers prompt look-up", own, prompt_lookup_num_tokens=8)
        found += [Transformers(TRANSFORMERS, own), look_up]
    if engines.servers:
        file = _gguf_of(model, progress)
        draft = None if engines.draft_model is None else _gguf_of(engines.draft_model, progress)
        for server in engines.servers:
            found += _of_server(engines, server, file, draft, context)
    return found


def _of_server(
    engines: OtherEngines, server: Server, model: str, draft: str | None, context: int
) -> Iterator[LlamaServer]:
    size, threads = str(context + CONTEXT_MARGIN), str(num_threads())
    common = ["-m", model, "-c", size, "-t", threads, "-tb", threads, "-np", "1"]
    if server.has("--cache-ram"):
        common += ["--cache-ram", "0"]  # otherwise it keeps a copy of every prompt's KV entries
    command = [*server.program, *common]
    plain = _plain_like(engines.servers, server)
    engine = next(s.name for s in engines.servers if s.program == server.program)

    def made(name: str, arguments: Sequence[str]) -> LlamaServer:
        # The user's arguments come last: they win.
        full = [*command, *arguments, *server.arguments]
        return LlamaServer(name, full, engine=engine, reference=plain)

    yield made(server.name, ())
    modes = server.modes()
    if draft is not None and not server.drafts_itself and server.has("--model-draft"):
        draft_size = ("-cd", size) if server.has("--ctx-size-draft") else ()
        modes = {DRAFT: (*server.draft_mode(draft), *draft_size), **modes}
    for mode, arguments in modes.items():
        if engines.modes is None or mode in engines.modes:
            yield made(f"{server.name}, {mode}", arguments)


def _plain_like(servers: Sequence[Server], server: Server) -> str | None:
    """The plain decoding of the same program with the arguments most like these: texts of other
    arguments may differ already."""
    if not server.drafts_itself:
        return server.name
    given = set(server.arguments)
    plain = [s for s in servers if s.program == server.program and not s.drafts_itself]

    def difference(other: Server) -> int:
        return len(given.symmetric_difference(other.arguments))

    return min(plain, key=difference).name if plain else None


def _gguf_of(model: str, progress: ProgressCallback) -> str:
    if model in ALIASES:
        ensure(ALIASES[model], progress)
        return str(ALIASES[model].gguf)
    return str(file_of(model))
