"""`naiad replay`: sends the requests of a recording to a server and says what differs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import sys
import time
from typing import TYPE_CHECKING, Protocol

import msgspec
import typer

from kernel.command.infer.connection import ClientError, base_url, speaks_http2
from kernel.command.replay.reading import RecordingIndex, recording_byte_size
from kernel.command.replay.report import ReplayReport
from kernel.command.replay.run import Replay, ReplaySettings
from kernel.recording.format import BadRecording
from kernel.recording.replayed import ReplayFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.recording.replayed import ReplayTarget

#: The module of each protocol's client. They are imported by their names: no package may import one above it.
_CLIENTS = {"http": "protocols.replay.http_client", "grpc": "protocols.replay.grpc_client"}


#: To read more takes longer than a second or two, so that a line says it.
_LARGE_BYTE_SIZE = 100 << 20


class _ClientModule(Protocol):
    def connect(self, url: str) -> ReplayTarget:
        """Return the server at `url`. Called in a running event loop."""


def replay_recording(
    folder: Path, to: str, settings: ReplaySettings, *, models: Sequence[str], protocol: str, as_json: bool, shown: int
) -> int:
    """Send the requests of a recording and print what differs.

    Returns the exit code: 0 if nothing differs, 1 if something does, 2 if nothing could be found out, 130 if a person
    has stopped it before something differed.
    """
    byte_size = recording_byte_size(folder)
    if byte_size > _LARGE_BYTE_SIZE:
        typer.echo(f"reading {byte_size >> 20:,} MiB", err=True)
    try:
        url = base_url(to)
        index = RecordingIndex(folder, frozenset(models))
        if not index.exchanges:
            to_models = f" to {', '.join(models)}" if models else ""
            raise BadRecording(f"there is no request{to_models} in '{folder}'{_what_is_there(folder, models)}")
        report = ReplayReport(url)
        report.notes += (*index.problems, *index.cuts)
        if index.orphan_count:
            report.notes.append(
                f"{index.orphan_count} responses were left out: their requests were removed for newer ones"
            )
        if protocol == "auto":
            protocol = "grpc" if url.startswith("http://") and speaks_http2(url) else "http"
        client: _ClientModule = importlib.import_module(_CLIENTS[protocol])
        with contextlib.suppress(KeyboardInterrupt):  # the report says so
            asyncio.run(_run(index, client, url, settings, report))
    except (ClientError, BadRecording, ReplayFailed) as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    if as_json:
        typer.echo(msgspec.json.encode(report.as_json()).decode())
    else:
        typer.echo(report.as_text(shown), nl=False)
    return report.exit_code


def _what_is_there(folder: Path, models: Sequence[str]) -> str:
    """Return the models that have requests in the recording, if others were asked for."""
    found = sorted({each.model for each in RecordingIndex(folder).exchanges}) if models else []
    return f": it has requests to {', '.join(found)}" if found else ""


async def _run(
    index: RecordingIndex, client: _ClientModule, url: str, settings: ReplaySettings, report: ReplayReport
) -> None:
    from rich.console import Console  # takes long, and a wrong command line needs none of it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    target = client.connect(url)
    try:
        await target.check()
        replay = Replay(index, target, settings, report)
        await replay.leave_out_missing()
        typer.echo(_introduction(index, replay, url), err=True)
        columns = ("Replaying", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=replay.total)
            await replay.run(lambda: bar.advance(task))
    finally:
        await target.close()


def _introduction(index: RecordingIndex, replay: Replay, url: str) -> str:
    """Return a line about what is going to be sent, and how long it will take at least."""
    first, last = (_local_time(index.exchanges[place].at_ns) for place in (0, -1))
    due_ns = replay.due_ns()
    takes = f", in {_duration(due_ns[-1] / 1e9)} or more (--speed 0: without pauses)" if due_ns and due_ns[-1] else ""
    return f"{replay.total} requests, recorded from {first} to {last}, go to {url}{takes}"


def _local_time(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns / 1e9))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
