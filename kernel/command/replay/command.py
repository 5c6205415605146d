"""`naiad replay`: sends the requests of a recording to a server and says what differs."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import TYPE_CHECKING, Protocol

import msgspec
import typer

from kernel.command.infer.connection import ClientError, base_url, speaks_http2
from kernel.command.replay.reading import RecordingIndex
from kernel.command.replay.report import ReplayReport
from kernel.command.replay.run import Replay, ReplaySettings
from kernel.options import BadOption
from kernel.recording.format import BadRecording
from kernel.recording.replayed import ReplayFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.recording.replayed import ReplayTarget

#: The module of each protocol's client. They are imported by their names: no package may import one above it.
_CLIENTS = {"http": "protocols.replay.http_client", "grpc": "protocols.replay.grpc_client"}


class _ClientModule(Protocol):
    def connect(self, url: str) -> ReplayTarget:
        """Return the server at `url`. Called in a running event loop."""


def replay_recording(
    folder: Path, to: str, settings: ReplaySettings, *, models: Sequence[str], protocol: str, as_json: bool, shown: int
) -> int:
    """Send the requests of a recording and print what differs. Returns the exit code. Raises `BadOption`."""
    try:
        url = base_url(to)
        index = RecordingIndex(folder, frozenset(models))
    except (ClientError, BadRecording) as error:
        raise BadOption(str(error)) from None
    if not index.exchanges:
        to_models = f" to {', '.join(models)}" if models else ""
        raise BadOption(f"there is no request{to_models} in '{folder}'")
    report = ReplayReport(url)
    report.notes += index.problems
    if index.cut_byte_size:
        report.notes.append(f"{index.cut_byte_size} bytes at the ends of files are no complete records: skipped")
    if index.orphan_count:
        report.notes.append(f"{index.orphan_count} responses belong to requests that are not in the recording: skipped")
    if protocol == "auto":
        protocol = "grpc" if url.startswith("http://") and speaks_http2(url) else "http"
    client: _ClientModule = importlib.import_module(_CLIENTS[protocol])
    try:
        asyncio.run(_run(index, client, url, settings, report))
    except ReplayFailed as error:
        raise BadOption(str(error)) from None
    if as_json:
        typer.echo(msgspec.json.encode(report.as_json()).decode())
    else:
        typer.echo(report.as_text(shown), nl=False)
    return int(report.differs)


async def _run(
    index: RecordingIndex, client: _ClientModule, url: str, settings: ReplaySettings, report: ReplayReport
) -> None:
    from rich.console import Console  # takes long, and a wrong command line needs none of it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    target = client.connect(url)
    try:
        await target.check()
        replay = Replay(index, target, settings, report)
        columns = ("Replaying", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=replay.total)
            await replay.run(lambda: bar.advance(task))
    finally:
        await target.close()
