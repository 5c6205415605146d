"""`make scoreboard`: every row of the scoreboard, and the table in `docs/reliability.md`.

python -m tests.faults                 all rows, a few minutes
python -m tests.faults --only S1 S7    these rows; of the others, the stored results stay in the table
python -m tests.faults --full          each fault as often as its promise says
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import traceback
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.machine import Machine, this_machine
from bench.progress import progress
from tests.faults.disturbance import DisturbanceWatch, watched
from tests.faults.page import unmeasured, verdict_of
from tests.faults.row import Finding, Result, Row, Settings, Skipped
from tests.faults.rows.table import ROWS
from tests.faults.stored import machine_line, publish

#: How often a row is measured that fails while the machine is disturbed. It fails if it fails every time.
MOST_TIMES = 3

#: What no error text of a server may contain: paths, addresses, traces.
SECRETS = re.compile(r"/dev/shm/|/tmp/|memfd|0x[0-9a-f]{6,}|Traceback|File \"|naiad-faults")


def main() -> int:
    """Measure. Returns 1 if a row failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="rows, such as S1")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--no-page", action="store_true", help="print the results only")
    chosen = parser.parse_args()
    rows = [row for row in ROWS if not chosen.only or row.id in chosen.only]
    machine = this_machine()
    results: list[Result] = []
    with progress() as shown, watched() as watch:
        bar = shown.add_task("starting", total=len(rows))
        for row in rows:
            shown.update(bar, description=f"{row.id} {row.fault}"[:38])
            results.append(measured_undisturbed(row, machine, watch, full=chosen.full))
            shown.console.print(f"{row.id}: {results[-1].figure} [{verdict_of(results[-1])}]", markup=False)
            shown.advance(bar)
    results = [hygiene(results) if each.row == "S40" else each for each in results]
    print_results(results)
    if not chosen.no_page:
        publish(results)
    return int(any(each.passed is False for each in results))


def measured_undisturbed(row: Row, machine: Machine, watch: DisturbanceWatch, *, full: bool) -> Result:
    """Measure one row, again if it fails while the machine is disturbed. The result says how much it was."""
    for number in range(1, MOST_TIMES + 1):
        watch.seen()
        result = measured(row, machine, full=full)
        if row.measure is None:
            return result
        seen = watch.seen()
        result = msgspec.structs.replace(
            result, stall_ms=round(seen.stall_ms, 1), others=round(seen.others, 2), measurements=number
        )
        if result.passed is not False or not seen.excuses:
            break
    return result


def measured(row: Row, machine: Machine, *, full: bool) -> Result:
    """Measure one row. What it raises is a failure of the row."""
    if row.measure is None:
        return unmeasured(row, row.reason)
    with tempfile.TemporaryDirectory(prefix="naiad-faults-") as temporary:
        try:
            finding = row.measure(Settings(Path(temporary), full))
        except Skipped as reason:
            return unmeasured(row, str(reason))
        except Exception as error:
            traceback.print_exc()
            finding = Finding("", [f"{type(error).__name__}: {error}"[:300]])
    return Result(
        row=row.id,
        promise=row.promise,
        fault=row.fault,
        limit=row.limit,
        figure=finding.figure,
        passed=not finding.wrong,
        reason="; ".join(finding.wrong),
        date=machine.date,
        commit=machine.commit,
        machine=machine_line(machine),
        full=full,
        texts=finding.texts,
    )


def hygiene(results: list[Result]) -> Result:
    """Return row S40: what the errors of all other rows say."""
    row = next(row for row in ROWS if row.id == "S40")
    texts = [text for each in results for text in each.texts]
    found = [text for text in texts if SECRETS.search(text)]
    own = next(each for each in results if each.row == "S40")
    return msgspec.structs.replace(
        own,
        figure=f"{own.figure}; {len(texts)} different error texts of the other rows, {len(found)} with a path or trace",
        passed=bool(own.passed) and not found,
        reason="; ".join(filter(None, [own.reason, *found[:3]])),
        limit=row.limit,
    )


def print_results(results: list[Result]) -> None:
    shown = Table(title="Scoreboard")
    for name in ("row", "promise", "fault", "limit", "figure", ""):
        shown.add_column(name, overflow="fold")
    for each in results:
        shown.add_row(each.row, each.promise, each.fault, each.limit, each.figure, verdict_of(each))
    Console().print(shown, markup=False)


if __name__ == "__main__":
    sys.exit(main())
