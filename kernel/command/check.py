"""`naiad check`: loads models in workers and tries them; reports what an author should know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.authoring.progress import progress_bar
from kernel.authoring.target import find_target
from kernel.authoring.tool_server import run_tool
from kernel.authoring.trial.repository import RepositoryCheck
from kernel.command.start_messages import table_text
from kernel.errors import ServingError
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kernel.authoring.tool_server import ToolServer
    from kernel.authoring.trial.repository import Checked
    from kernel.authoring.trial.trial import TrialSettings

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
    outputs in a batch than alone; else 0. Raises
    `BadOption`.
    """
    target = find_target(path)
    try:
        contents = target.scan()
    except ServingError as error:
        raise BadOption(error.message) from None
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
        typer.echo(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
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
