"""The measurement of `bench/inside.py` in its own process, for any source tree."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.server import environment

if TYPE_CHECKING:
    from pathlib import Path

#: The paths that are measured. Commits are compared by these names, so a name that changes cannot be compared any more.
PATHS = ("whole request in the kernel: HTTP", "whole request in the kernel: gRPC")

_CODE = "import json; from bench import inside; print(json.dumps(inside.measure()))"
_TIMEOUT_S = 120


def measure_apart(tree: Path) -> dict[str, float]:
    """Return microseconds of CPU time per request by path, measured by the `bench/inside.py` of the tree.

    The result is empty if the tree has no such file, or if it fails.
    """
    if not (tree / "bench" / "inside.py").is_file():  # Python would take that of an installed checkout
        return {}
    command = [sys.executable, "-c", _CODE]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, float] = json.loads(done.stdout) if not done.returncode else {}
    return found
