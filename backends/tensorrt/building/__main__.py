"""`python -m backends.tensorrt.building`: builds an engine. `naiad build-engine` starts it."""

from __future__ import annotations

import sys

from backends.tensorrt.building.command import run_command

if __name__ == "__main__":
    sys.exit(run_command())
