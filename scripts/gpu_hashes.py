"""Compiles every GPU kernel for sm_90 as the real code launches it, and compares with a record.

    python scripts/gpu_hashes.py record.json             # writes a record
    python scripts/gpu_hashes.py --compare record.json   # tells what differs from it

Needs no GPU, but Triton (the extra `gpu-check`). A record holds, for every launch, a hash of the
kernel's PTX, the grid and all values, so that code may be renamed and moved: equal records prove
equal work for the device. Different ones prove nothing by themselves. `--source` takes draftahead
from another folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    options = parser.parse_args()
    sys.path[:0] = [str(options.source.resolve()), str(ROOT / "tests")]
    from gpu_check.record import differences, recorded

    torch.set_num_threads(1)
    start = time.perf_counter()
    found = recorded()
    launches = [launch for variant in found.values() for launch in variant]
    kernels = {launch["kernel"] for launch in launches}
    codes = {launch["ptx"] for launch in launches}
    print(
        f"{len(found)} variants, {len(launches)} launches, {len(kernels)} kernels, {len(codes)} of "
        f"different code, {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
    )
    if not options.compare:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    told = differences(json.loads(options.record.read_text()), found)
    print("\n".join(told) or "equal")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
