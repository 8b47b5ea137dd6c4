"""Build hook: a wheel for Linux carries the CPU kernels compiled, for all instruction sets of its
machine. Without a C++ compiler it has their sources alone, which are then compiled at first use.

DRAFTAHEAD_WHEEL=pure makes a wheel without compiled kernels; DRAFTAHEAD_WHEEL=compiled fails where
they cannot be compiled.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from build_kernels import CannotCompileError, compile_kernels

FOLDER = "draftahead/backends/cpu/compiled"  # in the wheel: PACKAGED in build.py


class CompiledKernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("DRAFTAHEAD_WHEEL", "")
        if version == "editable" or wanted == "pure":
            return
        self.building = tempfile.TemporaryDirectory()
        try:
            library, tag = compile_kernels(Path(self.building.name))
        except CannotCompileError as failed:
            if wanted == "compiled":
                raise
            message = f"this wheel has no compiled kernels: {failed}"
            self.app.display_warning(message)
            return
        build_data["force_include"][str(library)] = f"{FOLDER}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if building := getattr(self, "building", None):
            building.cleanup()
