"""Sets everything up and runs `draftahead demo` with the arguments given."""

from __future__ import annotations

import subprocess
import sys

from setup_venv import python

if __name__ == "__main__":
    command = [python(), "-m", "draftahead", "demo", *sys.argv[1:]]
    try:
        sys.exit(subprocess.run(command, check=False).returncode)
    except KeyboardInterrupt:
        sys.exit(130)
