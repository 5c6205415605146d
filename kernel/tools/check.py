"""`naiad check`: loads models in workers and tries them; reports what an author should know.

The models are loaded one after the other. Load time, memory of the worker as the system counts it, and the outputs of
trial requests (`trial.py`) go into the report.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.config.gpus import NO_GPUS
from kernel.errors import BadOption, ServingError
from kernel.repository.ensembles import in_order, parts_by_name
from kernel.repository.source import ModelSource
from kernel.tools.printing import pretty_json, progress_bar, table_text
from kernel.tools.target import find_target
from kernel.tools.tool_server import run_tool
from kernel.tools.trial import Trial, TrialResult, TrialSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.repository.layout import ModelFolder, RepositoryContents
    from kernel.tools.printing import WorkProgress
    from kernel.tools.tool_server import ToolServer

_PRIVATE = re.compile(rb"^Private_\w+:\s+(\d+) kB$", re.MULTILINE)


def workers() -> dict[int, str]:
    """Return the worker processes of this server: process id → the name of its instance or model."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"backends.worker" not in words or f"--kernel={os.getpid()}".encode() not in words:
            continue
        titles = [word.removeprefix(b"--model=") for word in words if word.startswith(b"--model=")]
        if titles:
            found[int(entry)] = titles[0].decode(errors="replace")
    return found


def private_byte_size(pid: int) -> int:
    """Return the memory that would be free without the process: what it shares with others does not count.

    0 if the process has ended.
    """
    try:
        text = Path("/proc", str(pid), "smaps_rollup").read_bytes()
    except OSError:
        return 0
    return sum(map(int, _PRIVATE.findall(text))) * 1024


class Checked(msgspec.Struct):
    """What was found out about a model."""

    name: str
    #: ok, breaks, differs, varies, refused (see `TrialResult`), crashed (a worker died), or failed (it does not load).
    verdict: str = "ok"
    load_s: float = 0.0
    #: The memory of the model's workers alone, when it was loaded and after the trial.
    loaded_byte_size: int = 0
    tried_byte_size: int = 0
    inputs: str = ""
    request_count: int = 0
    findings: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether nothing was found that an author must repair."""
        return self.verdict in ("ok", "varies", "refused")


class RepositoryCheck:
    """The check of the models in a listing."""

    def __init__(self, contents: RepositoryContents, settings: TrialSettings, slow_load_s: float) -> None:
        self._folders = contents.models
        self._settings = settings
        self._slow_load_s = slow_load_s
        #: In the order of the check.
        self.results: dict[str, Checked] = {}
        #: Model → process ids of its workers.
        self._workers: dict[str, set[int]] = {}

    def order(self) -> list[str]:
        """Return the names of the models, ensembles after the models of their steps. Blocks."""
        ensembles = in_order(parts_by_name(self._folders.values(), ""))
        return [name for name in self._folders if name not in ensembles] + ensembles

    async def run(self, server: ToolServer, names: Sequence[str], progress: WorkProgress) -> None:
        """Load all models, so that they can call one another; then try each that is loaded."""
        for name in names:
            progress.works_on(f"load {name}")
            self.results[name] = await self._load(server, name)
            progress.done()
        for name in names:
            progress.works_on(f"try {name}")
            if self.results[name].verdict == "ok":
                await self._try(server, self._folders[name], self.results[name])
            progress.done()

    async def _load(self, server: ToolServer, name: str) -> Checked:
        result, before, began = Checked(name), set(workers()), time.monotonic()
        try:
            await server.kernel.repository.load(name)
        except ServingError as error:
            return Checked(name, "failed", findings=[_reason(error)])
        result.load_s = time.monotonic() - began
        self._workers[name] = set(workers()) - before
        result.loaded_byte_size = self._byte_size(name)
        if result.load_s > self._slow_load_s:
            result.findings.append(f"slow: it took {result.load_s:.1f} s to load")
        return result

    async def _try(self, server: ToolServer, folder: ModelFolder, result: Checked) -> None:
        model = server.kernel.catalog.resolve(result.name)
        try:
            files = ModelSource(folder, gpus=NO_GPUS, auto_complete=True).read_warmup_files(model.config)
            found = await Trial(server.kernel, model.spec, self._settings).run(model.config, files)
        except ServingError as error:  # a warm-up file that has gone
            found = TrialResult("failed", findings=[error.message])
        result.verdict, result.inputs, result.request_count = found.verdict, found.inputs, found.request_count
        result.findings += found.findings
        result.tried_byte_size = self._byte_size(result.name)
        if self._workers[result.name] - workers().keys():
            result.verdict = "crashed"
            result.findings.append("a worker of the model died during the trial; --verbose shows what it printed")

    def _byte_size(self, name: str) -> int:
        return sum(map(private_byte_size, self._workers[name]))


def _reason(error: ServingError) -> str:
    """Return why a model does not load. Clients get only Triton's general text if its configuration is wrong."""
    cause = error.__cause__
    return (cause if isinstance(cause, ServingError) else error).message.strip()


#: Verdict → what the table says.
_VERDICTS = {
    "ok": "ok",
    "breaks": "BREAKS CONFIGURATION",
    "differs": "OUTPUTS DIFFER",
    "varies": "varies from run to run",
    "refused": "not tried",
    "crashed": "CRASHED",
    "failed": "DOES NOT LOAD",
}


def check_models(
    path: Path, settings: TrialSettings, *, slow_load_s: float, as_json: bool = False, verbose: bool = False
) -> int:
    """Check the models at `path`, a repository or the folder of one model, and print what was found.

    Returns 1 if a model does not load, crashes, sends outputs that its configuration does not have, or gives other
    outputs in a batch than alone; else 0. Raises `BadOption`, `ServingError`.
    """
    target = find_target(path)
    contents = target.scan()
    if not contents.models:
        raise BadOption(contents.hints[0] if contents.hints else f"there is no model in '{path}'")
    check = RepositoryCheck(contents, settings, slow_load_s)
    names = check.order()

    async def work(server: ToolServer) -> None:
        with progress_bar(2 * len(names)) as progress:
            await check.run(server, names, progress)

    run_tool([target.repository], work, verbose=verbose)
    results = [check.results[name] for name in sorted(names)]
    if as_json:
        typer.echo(pretty_json(results))
    else:
        typer.echo(_report(results), nl=False)
    return 0 if all(each.passed for each in results) else 1


def _report(results: Iterable[Checked]) -> str:
    rows = [_row(each) for each in results]
    notes = "".join(f"{each.name}: {finding}\n" for each in results for finding in each.findings)
    table = table_text(("Model", "Result", "Load", "Memory", "Requests", "Inputs"), rows)
    return f"{table}{notes}"


def _row(found: Checked) -> tuple[str, ...]:
    if found.verdict == "failed":
        return found.name, _VERDICTS["failed"], "-", "-", "-", "-"
    memory = f"{found.loaded_byte_size / 2**20:.1f} MiB"
    if (grown := found.tried_byte_size - found.loaded_byte_size) > 2**20:
        memory += f" + {grown / 2**20:.1f}"
    return (
        found.name,
        _VERDICTS[found.verdict],
        f"{found.load_s:.2f} s",
        memory if found.loaded_byte_size else "-",
        str(found.request_count),
        found.inputs or "-",
    )
