"""Makes the project's virtual environment, once, with the tested versions. Needs Python and pip.

demo.py and test.py beside it call `python()` and run what it returns. The hooks of
.pre-commit-config.yaml run a tool of the environment: `python3 scripts/setup_venv.py ruff check`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
DEVELOPMENT = "dev,gpu-check"  # extras


def python(extras: str = "") -> str:
    """The environment's interpreter, with draftahead (and its extras, such as dev) installed."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit("draftahead needs Python 3.11 or newer")
    folder = "Scripts" if sys.platform == "win32" else "bin"
    interpreter = ENVIRONMENT / folder / "python"
    wanted = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in wanted)).hexdigest()
    stamp = ENVIRONMENT / f"installed{extras}-{digest[:16]}"
    if not stamp.exists():
        print(f"setting up {ENVIRONMENT} (once)", file=sys.stderr, flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        target = f"{ROOT}[{extras}]" if extras else str(ROOT)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        command = [str(interpreter), *install, *constraints, "-e", target]
        if subprocess.run(command, check=False).returncode:
            sys.exit("the installation failed; see pip's message above")
        stamp.touch()
    return str(interpreter)


if __name__ == "__main__":
    tool = Path(python(DEVELOPMENT)).with_name(sys.argv[1])
    sys.exit(subprocess.run([str(tool), *sys.argv[2:]], check=False).returncode)
