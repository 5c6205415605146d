"""The measurement of `bench/inside.py` in a process of its own: for any source tree, and without importing a server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.server import environment

if TYPE_CHECKING:
    from pathlib import Path

#: What is measured. Commits are compared by these names: a name that changes cannot be compared any more.
PATHS = ("whole request in the kernel: HTTP", "whole request in the kernel: gRPC")

_CODE = "import json; from bench import inside; print(json.dumps(inside.measure()))"
_TIMEOUT_S = 120


def measure_apart(tree: Path) -> dict[str, float]:
    """Return microseconds of CPU time per request by path, as the tree's own `bench/inside.py` measures them.

    Empty where the tree has none, or one that fails.
    """
    command = [sys.executable, "-c", _CODE]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, float] = json.loads(done.stdout) if not done.returncode else {}
    return found
