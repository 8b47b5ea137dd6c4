"""Seconds from the start of a process to the first token of a short prompt, ours and others'.

    python benchmarks/first_token.py FILE.gguf [--repeats 3] [--against llama.cpp] \
      [--against 'ik=/path/llama-server -rtr'] [--json FILE] [-- OPTIONS OF draftahead chat]

`draftahead chat` gets a message on its standard input; the clock stops at the first byte of its
answer. "first start": with an empty cache folder but compiled kernels, as after `pip install` of a
wheel. "later start": with what the first has left there. A llama-server is started, asked for its
health every 20 ms, and then for one token of the same prompt. "imports": a process that does
nothing else. All of them in turn, in each repetition; the file is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from draftahead.bench.against import NO_MODES, parse_against
from draftahead.bench.llama_server import LlamaServer
from draftahead.bench.machine import provenance
from draftahead.bench.other_engines import configurations_of
from draftahead.core.sampling_params import SamplingParams
from draftahead.loader.embedded import cache_root
from draftahead.loader.hub import load_tokenizer

MESSAGE = "Hello there, how are you?"
CONTEXT = 2048  # tokens, of servers; ours takes memory as it fills
IMPORTS = {
    "imports: torch": "import torch",
    "imports: torch and transformers' models": (
        "import torch; from transformers.models.llama import modeling_llama"
    ),
}


Measured = Callable[[], float]


def first_byte(command: list[str], cache: Path) -> float:
    """Seconds to the first byte that a command prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**environment, "DRAFTAHEAD_CACHE": str(cache)},
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(f"{MESSAGE}\n".encode())
        process.stdin.close()
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        said = process.stderr.read().decode(errors="replace")
    if not first or process.returncode:
        raise SystemExit(f"{command} printed nothing: {said}")
    return seconds


def first_start(command: list[str], kernels: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernels").symlink_to(kernels)
        return first_byte(command, Path(folder))


def server_start(server: LlamaServer, prompt: list[int]) -> float:
    start = time.perf_counter()
    with server.running():
        server.run([prompt], SamplingParams(max_tokens=1, temperature=0))
        return time.perf_counter() - start


def configurations(args: argparse.Namespace) -> dict[str, Measured]:
    cache = cache_root()
    chat = [sys.executable, "-m", "draftahead", "chat", "--model", str(args.model)]
    chat += ["--max-tokens", "1", "--temperature", "0", *args.options]
    messages = [{"role": "user", "content": MESSAGE}]
    prompt = load_tokenizer(args.model).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    found: dict[str, Measured] = {
        name: partial(first_byte, [sys.executable, "-c", f"{code}; print(1)"], cache)
        for name, code in IMPORTS.items()
    }
    found["draftahead chat, first start"] = partial(first_start, chat, cache / "kernels")
    found["draftahead chat, later start"] = partial(first_byte, chat, cache)
    modes = [NO_MODES] if args.against else None
    engines = parse_against(args.against, modes, str(args.model), None)
    for server in configurations_of(engines, str(args.model), torch.device("cpu"), CONTEXT):
        assert isinstance(server, LlamaServer)
        found[server.name] = partial(server_start, server, prompt)
    found["draftahead chat, later start"]()  # kernels, bytecode and what else is kept are there now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--against", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = [*sys.argv[1:], "--"]
    args = parser.parse_args(given[: given.index("--")])
    args.options = given[given.index("--") + 1 : -1]
    args.model.read_bytes()  # now it is in the page cache
    measured = configurations(args)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(args.repeats):
        for name, measure in measured.items():
            seconds[name].append(measure())
    for name, values in seconds.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name:45} {statistics.median(values):6.2f} s   ({spread})")
    if args.json is not None:
        report = {**provenance(), "seconds": seconds}
        # Where files lie is no business of the report's.
        report["argv"] = [re.sub(r"[^\s=]*/", "", argument) for argument in report["argv"]]
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
