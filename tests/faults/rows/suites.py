"""Rows whose cases are tests of `make test`: they are run, and counted."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.checkout import ROOT
from tests.faults.row import Finding, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|xfailed|error|errors|deselected)")


def tests(*arguments: str) -> Callable[[Settings], Finding]:
    """Return the measurement of a row by tests: paths and options of pytest."""
    return functools.partial(_tests, arguments)


def _tests(arguments: tuple[str, ...], settings: Settings) -> Finding:
    missing = [
        each for each in arguments if each.startswith("tests/") and not (ROOT / each.partition("::")[0]).exists()
    ]
    if missing:
        return Finding("", [f"there is no {missing[0]}"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=300", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    counts = {kind: int(count) for count, kind in _COUNTS.findall(last)}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    wrong = [] if done.returncode == 0 else [f"{last}: {'; '.join(failed[:3])}"]
    skipped = f", {counts['skipped']} skipped" if counts.get("skipped") else ""
    paths = [each for each in arguments if each.startswith("tests/")]
    return Finding(
        f"{counts.get('passed', 0)} cases, {counts.get('failed', 0)} failed{skipped} (`{'`, `'.join(paths)}`)", wrong
    )
