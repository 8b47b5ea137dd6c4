"""Sets everything up and runs all checks: lint, format, types, tests. Arguments go to pytest."""

from __future__ import annotations

import subprocess
import sys

from setup_venv import ROOT, python

if __name__ == "__main__":
    run = [python("dev"), "-m"]
    checks = [
        ["ruff", "check", "--quiet"],
        ["ruff", "format", "--check", "--quiet"],
        ["mypy", "--no-error-summary"],
        ["pytest", "--quiet", *sys.argv[1:]],
    ]
    for check in checks:
        print(f"{' '.join(check)}", flush=True)
        if code := subprocess.run([*run, *check], cwd=ROOT, check=False).returncode:
            sys.exit(code)
