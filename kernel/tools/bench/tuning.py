"""`naiad tune`: tries configurations of a model on a running server, and writes the best one after asking."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kernel.config.load import from_pbtxt
from kernel.errors import ServingError
from kernel.tools.bench.command import ended_by_signals
from kernel.tools.bench.contender import BenchContender
from kernel.tools.bench.plot import check_plotting, draw_candidates
from kernel.tools.bench.tune_candidates import (
    WORTH,
    TuneRow,
    batch_sizes,
    candidate_of,
    find_best,
    goes_on,
    load_problem,
    lost_settings,
    new_text,
    pbtxt_of,
    table_of,
    why_not,
    with_candidate,
)
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.tools.bench.options import BenchSettings
    from kernel.tools.bench.results import PointRow
    from kernel.tools.bench.tune_candidates import LatencyGoal, TuneCandidate

_OK, _NOT_TUNED, _INTERRUPTED = 0, 2, 130

#: The old configuration stays beside the new one.
_BACKUP = "config.pbtxt.before-tune"
_NEW = "config.pbtxt.of-tune"


class TuneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A run of `naiad tune`."""

    goal: LatencyGoal
    instances: list[int]
    #: Empty: what the model has, and more.
    batch_sizes: list[int]
    delays_us: list[int]
    #: The model's folder, or its config.pbtxt; "" writes nothing.
    write: str
    yes: bool
    as_json: bool
    png: str


def run_tune(bench: BenchSettings, settings: TuneSettings) -> int:
    """Tune, print, write, and return the exit code."""
    try:
        if settings.png:
            check_plotting()
        file = _config_file(settings.write) if settings.write else None
        with ended_by_signals(), BenchContender(bench.url, bench) as contender:
            return _Tuning(bench, settings, contender).run(file)
    except ClientError as error:
        typer.echo(f"error: {error}", err=True)
        return _NOT_TUNED


def _config_file(path: str) -> Path:
    """Return the config.pbtxt in a model's folder. Raises `ClientError` before minutes are spent."""
    given = Path(path)
    file = given if given.suffix == ".pbtxt" else given / "config.pbtxt"
    if not file.parent.is_dir():
        raise ClientError(f"--write: there is no folder '{file.parent}'")
    return file


class _Tuning:
    """The search on one server. The model's configuration is restored whatever ends it."""

    def __init__(self, bench: BenchSettings, settings: TuneSettings, contender: BenchContender) -> None:
        self._bench = bench
        self._settings = settings
        self._contender = contender
        config = contender.config
        if config is None:
            raise ClientError("the server does not say the model's configuration, so that it cannot be changed")
        if reason := why_not(config):
            raise ClientError(f"model '{bench.model}' cannot be tuned: {reason}")
        self._config: dict[str, Any] = config
        self._rows: list[TuneRow] = []
        #: Whether the server has been asked to load the model with another configuration.
        self._changed = False

    def run(self, file: Path | None) -> int:
        """Search, restore, print, and write the best configuration to `file` if a person agrees."""
        start = candidate_of(self._config)
        values: dict[str, Sequence[object]] = {}
        if start.max_batch_size:
            values["max_batch_size"] = self._settings.batch_sizes or batch_sizes(self._config)
            values["delay_us"] = self._settings.delays_us
        values["instances"] = self._settings.instances
        best: TuneCandidate | None = None
        interrupted = False
        try:
            best = self._confirmed(start, find_best(start, values, self._measure))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._restore()
        if best is not None and not any(row.candidate == best and row.best(self._settings.goal) for row in self._rows):
            best = None  # nothing has met the goal
        self._print(best)
        if interrupted:
            typer.echo("stopped by the keyboard; the model has its old configuration", err=True)
            return _INTERRUPTED
        if best is None:
            typer.echo(f"no configuration has {self._settings.goal.text()}; nothing is changed", err=True)
            return _NOT_TUNED
        if best == start:
            typer.echo("the configuration of now is the best one; nothing is changed", err=True)
            return _OK
        self._offer(best, file)
        return _OK

    def _confirmed(self, start: TuneCandidate, best: TuneCandidate) -> TuneCandidate:
        """Return the better one of both, measured again: the highest of many figures may be the luckiest one."""
        if best == start:
            return best
        self._say_line("again, the configuration of now and the best one:")
        before, after = ((self._measure(candidate) or 0.0) for candidate in (start, best))
        self._rows = [row for row in self._rows[:-2] if row.candidate not in (start, best)] + self._rows[-2:]
        return best if after > WORTH * before else start

    def _measure(self, candidate: TuneCandidate) -> float | None:
        """Return the rate of a candidate within the goal; see `find_best`."""
        goal = self._settings.goal
        was_changed, self._changed = self._changed, True  # from here on, even if the keyboard ends the load
        try:
            self._contender.target.load(with_candidate(self._config, candidate))
        except ClientError as error:
            if not self._rows:
                self._changed = was_changed
                raise ClientError(
                    f"the server does not load the model with another configuration: {error}. It must run with "
                    "--model-control-mode=explicit, and allow it (--admin-access)"
                ) from None
            self._rows.append(TuneRow(candidate, [], load_problem(str(error))))
            self._say(self._rows[-1])
            return None
        loads: list[PointRow] = []
        try:
            for level in self._bench.levels:
                if not goes_on(loads, goal):
                    break
                self._contender.measure(level, _no_progress)
                loads.append(self._contender.rows[-1])
        finally:
            errors = [error for row in loads for error in row.errors]
            self._rows.append(TuneRow(candidate, loads, errors[0] if errors else ""))
        self._say(self._rows[-1])
        best = self._rows[-1].best(goal)
        return best.rate if best is not None else 0.0

    def _say(self, row: TuneRow) -> None:
        best = row.best(self._settings.goal)
        text = f"{best.rate:,.0f} requests/s" if best is not None else row.problem or "misses the goal"
        self._say_line(f"{row.candidate.text()}: {text}")

    def _say_line(self, text: str) -> None:
        typer.echo(text, err=True)

    def _restore(self) -> None:
        """Load the model as it was: from its repository, or with the configuration that a client had given."""
        if not self._changed:
            return
        target = self._contender.target
        target.load(None)
        if target.config() != self._config:
            target.load(self._config)

    def _print(self, best: TuneCandidate | None) -> None:
        goal = self._settings.goal
        if self._settings.as_json:
            document = {"model": self._bench.model, "goal": goal, "best": best, "rows": self._rows}
            typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
        else:
            typer.echo(table_of(self._rows, goal, best), nl=False)
        if self._settings.png and self._rows:
            draw_candidates(self._rows, goal, best, self._bench.model, Path(self._settings.png))
            typer.echo(f"wrote {self._settings.png}", err=True)

    def _offer(self, best: TuneCandidate, file: Path | None) -> None:
        """Show the new settings, and write them if a person agrees."""
        config = with_candidate(self._config, best)
        typer.echo(f"\nThe best configuration, {best.text()}:\n\n{pbtxt_of(config)}", err=True)
        if file is None:
            typer.echo("--write MODEL_FOLDER writes it to config.pbtxt", err=True)
            return
        if lost := lost_settings(config):
            raise ClientError(f"write it by hand: {', '.join(lost)} must stay in these fields of '{file}'")
        try:
            before = file.read_text(encoding="utf-8") if file.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ClientError(f"write it by hand: cannot read '{file}': {reason}") from None
        after = new_text(before, config)
        try:
            from_pbtxt(after.encode(), str(file))
        except ServingError as error:
            raise ClientError(f"write it by hand, '{file}' is not understood: {error.message}") from None
        if not self._settings.yes:
            if not sys.stdin.isatty():
                typer.echo("nothing is written: --yes agrees without a question", err=True)
                return
            if not typer.confirm(f"Write it to {file}?", err=True):
                return
        try:
            if before:
                file.with_name(_BACKUP).write_text(before, encoding="utf-8")
            new = file.with_name(_NEW)
            new.write_text(after, encoding="utf-8")
            new.replace(file)  # in one step: a server that polls its repository never reads half of it
        except OSError as error:
            raise ClientError(f"cannot write '{file}': {error.strerror}") from None
        self._contender.target.load(None)
        old = f"; the old text is in {_BACKUP}" if before else ""
        typer.echo(f"wrote {file}{old}", err=True)
        found = self._contender.target.config()
        if found is None or candidate_of(found) != best:
            typer.echo(f"the server has loaded something else: is '{file}' the file that it reads?", err=True)


def _no_progress(completed: int, failed: int) -> None:
    """Show nothing: a line for each configuration is enough."""
