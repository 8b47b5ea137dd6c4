"""Run as a script: the llama.cpp of the optional package xllamacpp, with those of llama-server's
options that the benchmark uses. In a process of its own it is started, measured and killed like
any llama-server."""

import argparse
import sys
import threading
from importlib.metadata import version

import xllamacpp

PREFIX = "COMMON_SPECULATIVE_TYPE_"


def speculative_types() -> dict[str, object]:
    """By the names that llama-server's --spec-type has."""
    kinds = xllamacpp.common_speculative_type
    names = [name for name in dir(kinds) if name.startswith(PREFIX) and not name.endswith("COUNT")]
    return {name[len(PREFIX) :].lower().replace("_", "-"): getattr(kinds, name) for name in names}


def parsed() -> argparse.Namespace:
    types = speculative_types()
    parser = argparse.ArgumentParser(
        prog="llama.cpp", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"xllamacpp {version('xllamacpp')}")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--spec-type", choices=types, default="none", metavar=",".join(types))
    parser.add_argument("-c", "--ctx-size", type=int, required=True)
    parser.add_argument("-t", "--threads", type=int, required=True)
    parser.add_argument("-tb", "--threads-batch", type=int, required=True)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("--cache-ram", type=int, default=0)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args()


def serve() -> None:
    given, parameters = parsed(), xllamacpp.CommonParams()
    parameters.model.path = given.model
    parameters.hostnames, parameters.port = [given.host], given.port
    parameters.n_ctx, parameters.n_parallel = given.ctx_size, given.parallel
    parameters.cpuparams.n_threads = given.threads
    parameters.cpuparams_batch.n_threads = given.threads_batch
    parameters.cache_ram_mib = given.cache_ram
    if given.spec_type != "none":
        parameters.speculative.types = [speculative_types()[given.spec_type]]
    if given.model_draft:
        draft = parameters.speculative.draft
        draft.mparams.path = given.model_draft
        draft.cpuparams.n_threads = given.threads
        draft.cpuparams_batch.n_threads = given.threads_batch
    server = xllamacpp.Server(parameters)  # returns when the model is loaded
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    threading.Event().wait()  # until it is killed


if __name__ == "__main__":
    serve()
