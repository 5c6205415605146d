"""What a person sees after a mistake: warnings, errors and the table of models, without what differs from run to run.

`python -m tests.end_to_end.mistakes.transcript` writes the files of all mistakes again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.server import wait_for
from tests.end_to_end.mistakes.cases import MISTAKES

if TYPE_CHECKING:
    from tests.end_to_end.mistakes.cases import Mistake

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]

FREE_PORTS = (
    "--http-port=0",
    "--grpc-port=0",
    "--metrics-port=0",
    "--http-address=127.0.0.1",
    "--grpc-address=127.0.0.1",
)

_LOG_LINE = re.compile(r"([EWI])\d{4} [\d:.]+ \d+ \S+\] (.*)")


def expected(mistake: Mistake) -> str:
    return (FOLDER / f"{mistake.name}.txt").read_text()


def transcript(mistake: Mistake, folder: Path) -> str:
    """Make the mistake in `folder`, which is empty, and return what a person sees."""
    for path, content in mistake.files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    for path in mistake.folders:
        (folder / path).mkdir(parents=True)
    code, printed = _run(mistake, folder)
    variables = "".join(f"{name}={text} " for name, text in mistake.environment.items())
    end = "(serves)" if code is None else f"(exit code {code})"
    lines = [f"# {mistake.title}", "", *_shown_files(mistake), f"$ {variables}naiad {mistake.command}", ""]
    return "\n".join([*lines, *_seen(printed, folder), "", end, ""])


def _shown_files(mistake: Mistake) -> list[str]:
    """Return the lines about the files: short texts as they are, of others the names."""
    found: list[str] = []
    for path, content in mistake.files.items():
        found.append(path)
        if isinstance(content, str):
            found += [f"    {line}".rstrip() for line in content.splitlines()]
    found += [f"{path}/" for path in mistake.folders]
    return [*found, ""] if found else []


def _run(mistake: Mistake, folder: Path) -> tuple[int | None, str]:
    """Return the exit code, None for a server that serves, and what was printed."""
    words = shlex.split(mistake.command)
    if words[0] == "run" and not mistake.environment:
        words += FREE_PORTS
    environment = {
        **os.environ, **mistake.environment, "TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kernel", *words], cwd=folder, env=environment, stdout=output, stderr=output
        )

        def text() -> str:
            return Path(output.name).read_text()

        try:
            wait_for(lambda: process.poll() is not None or "Started HTTPService" in text())
            return process.poll(), text()
        finally:
            process.terminate()
            process.wait(60)


def _seen(printed: str, folder: Path) -> list[str]:
    """Return the lines that matter to a person, with paths as they are typed in `folder`."""
    found: list[str] = []
    printed = printed.replace(f"{folder}/", "").replace(sys.executable, "python")
    in_models = False
    for line in printed.splitlines():
        logged = _LOG_LINE.match(line)
        if line.startswith(("+", "|")):
            in_models = (in_models or line.startswith("| Model ")) and not line.startswith("| Option ")
            if in_models and line.startswith("|"):
                found.append(" ".join(line.split()))
        elif logged is None:
            found.append(line)
        elif logged[1] != "I":
            found.append(f"{logged[1]} {logged[2]}")
        in_models = in_models and line.startswith(("+", "|"))
    return found


def main() -> None:
    """Write what all mistakes show now."""
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{mistake.name}.txt").write_text(transcript(mistake, Path(folder).resolve()))


if __name__ == "__main__":
    main()
