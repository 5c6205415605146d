"""`naiad bench`: measures a model of any server that speaks KServe v2, and prints what was measured."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.tools.bench.contender import BenchContender
from kernel.tools.bench.plot import check_plotting, draw
from kernel.tools.bench.report import compared_text, csv_text, level_name, run_text
from kernel.tools.bench.results import FORMAT, BenchRun, StoredRuns
from kernel.tools.client import ClientError
from kernel.tools.printing import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from kernel.tools.bench.options import BenchSettings
    from kernel.tools.bench.results import PointRow
    from kernel.tools.printing import WorkProgress

#: The exit codes: all requests succeeded, some failed, nothing could be measured, the keyboard has ended it.
_OK, _FAILED_REQUESTS, _NOT_MEASURED, _INTERRUPTED = 0, 1, 2, 130


def run_bench(settings: BenchSettings) -> int:
    """Measure, print, and return the exit code."""
    try:
        if settings.png:
            check_plotting()
        with ended_by_signals():
            runs, code = _measured(settings)
        return _print(settings, runs, code)
    except ClientError as error:
        typer.echo(f"error: {error}", err=True)
        return _NOT_MEASURED


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP what Ctrl-C is: regions are removed, and what was measured is printed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _is_file(against: str) -> bool:
    """Whether `--against` names a file, and not a server."""
    return against.endswith(".json") or (bool(against) and Path(against).exists())


def _measured(settings: BenchSettings) -> tuple[list[BenchRun], int]:
    """Return the runs of all servers, as far as they have come, and the exit code of what has ended them early."""
    earlier = _stored(settings.against) if _is_file(settings.against) else None
    addresses = [settings.url]
    if settings.against and earlier is None:
        addresses.append(settings.against)
    code = _OK
    with contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(BenchContender(address, settings)) for address in addresses]
        try:
            _measure_all(settings, contenders)
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except ClientError as error:
            if not any(each.rows for each in contenders):
                raise
            typer.echo(f"error: {error}", err=True)  # the loads before it are worth having
            code = _NOT_MEASURED
        runs = [each.run() for each in contenders]
    # An earlier run is what this one is compared with.
    return ([earlier, *runs] if earlier is not None else runs), code


def _measure_all(settings: BenchSettings, contenders: Sequence[BenchContender]) -> None:
    """Measure each load with each server, one server after the other, so that a slower hour is one for both."""
    seconds = (settings.warmup_s + settings.duration_s) * len(settings.levels) * len(contenders)
    with progress_bar(seconds, time_left=True) as bar:
        shown = _LoadProgress(bar)
        for level in settings.levels:
            for contender in contenders:
                label = f"{contender.target.label}  " if len(contenders) > 1 else ""
                name = f"{label}{level.rate:g}/s" if level.rate else f"{label}{level.connections} in flight"
                shown.begin(name, settings.warmup_s + settings.duration_s)
                contender.measure(level, shown.counted)
                shown.end()


class _LoadProgress:
    """Shows how far the loads are, in seconds, and how many requests the present one has had."""

    def __init__(self, bar: WorkProgress) -> None:
        self._bar = bar
        self._done_s = 0.0

    def begin(self, name: str, seconds: float) -> None:
        """A load begins that takes `seconds` seconds."""
        self._name, self._seconds, self._begin = name, seconds, time.monotonic()
        self._bar.works_on(name)

    def counted(self, completed: int, failed: int) -> None:
        """`completed` requests have succeeded so far, and `failed` requests have failed."""
        passed = min(time.monotonic() - self._begin, self._seconds)
        errors = f", {failed:,} errors" if failed else ""
        self._bar.reached(self._done_s + passed, f"{self._name}: {completed:,} requests{errors}")

    def end(self) -> None:
        """The load has ended."""
        self._done_s += self._seconds


def _stored(path: str) -> BenchRun:
    """Return the run in a file of `--json`. Raises `ClientError`."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=StoredRuns)
    except OSError as error:
        raise ClientError(f"--against: cannot read '{path}': {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ClientError(f"--against: '{path}' is not what 'naiad bench --json' prints: {error}") from None
    if found.naiad_bench != FORMAT or not found.runs:
        raise ClientError(f"--against: '{path}' has no run that this version can read")
    return found.runs[-1]


def _print(settings: BenchSettings, runs: list[BenchRun], code: int) -> int:
    """Print the runs; `code` is not 0 if something has ended them early. Returns the exit code."""
    own = runs[1:] if _is_file(settings.against) else runs
    if settings.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(StoredRuns(FORMAT, runs)), indent=1).decode())
    elif settings.as_csv:
        typer.echo(csv_text(runs), nl=False)
    elif len(runs) > 1:
        typer.echo(compared_text(runs[0], runs[1]), nl=False)
    else:
        typer.echo(run_text(runs[0]), nl=False)
    rows = [row for run in own for row in run.points]
    if settings.png and any(row.completed for row in rows):
        draw(runs, Path(settings.png))
        typer.echo(f"wrote {settings.png}", err=True)
    if code == _INTERRUPTED:
        typer.echo(f"stopped by the keyboard, after {_last(rows)}", err=True)
    if code:
        return code
    if not any(row.completed for row in rows):
        return _NOT_MEASURED
    return _FAILED_REQUESTS if any(row.failed for row in rows) else _OK


def _last(rows: Sequence[PointRow]) -> str:
    return level_name(rows[-1]) if rows else "no load"
