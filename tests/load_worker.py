"""Loads damaged models, one number of a case per line of input: prints what came of each.

    python load_worker.py FOLDER < numbers

The address space may grow by 2 GB from what the libraries take, and a case that takes more than
LONGEST seconds of the CPU ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from damaged_models import Cases
from draftahead import LLM, SamplingParams
from draftahead.errors import DraftaheadError

MORE_MEMORY = 2 * 2**30
LONGEST = 20.0
PARAMS = SamplingParams(temperature=0, max_tokens=3)


def outcome(path: Path) -> str:
    """`works`, or the error's class; anything that is not ours begins with `!`."""
    try:
        llm = LLM(path, "none", max_batch=1, device="cpu")
        llm.generate([[3, 4, 5]], PARAMS)
        if llm.tokenizer is not None:
            llm.generate(["abc a"], PARAMS)
            llm.chat([{"role": "user", "content": "abc"}], PARAMS)
    except DraftaheadError as error:
        text = str(error)
        return f"{type(error).__name__}: {text}" if "\n" not in text else f"!lines: {text!r}"
    except BaseException as error:
        return f"!{type(error).__name__}: {error}"
    return "works"


def main(root: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tokenizers library prints as well
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = Cases(root / "sound")
    for name in cases.gguf:  # what is loaded first also loads code
        assert outcome(root / "sound" / f"{name}.gguf") == "works"
    for name in cases.folders:
        assert outcome(root / "sound" / name) == "works", outcome(root / "sound" / name)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        folder = root / "damaged"
        folder.mkdir()
        path = cases.write(int(line), folder)
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        before = time.process_time()
        found = outcome(path)
        seconds = time.process_time() - before
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([int(line), seconds, found]), file=answers, flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
