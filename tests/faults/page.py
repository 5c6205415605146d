"""The table of `docs/reliability.md`, made of the results of rows. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.faults.row import Result, Row

BEGIN, END = "<!-- rows: make scoreboard -->", "<!-- end of rows -->"


def number_of(row: str) -> tuple[int, str]:
    """Return the key by which rows are sorted: S2 stands before S10."""
    found = re.search(r"\d+", row)
    return (int(found[0]) if found else 0, row)


def verdict_of(result: Result) -> str:
    """Return the last cell of a row."""
    if result.passed is None:
        return f"not measured: {result.reason}"
    return "passed" if result.passed else f"**failed**: {result.reason}"


def table(results: Iterable[Result]) -> str:
    """Return the table in Markdown, sorted."""
    lines = ["| row | promise | fault | limit | figure | | measured |", "|---|---|---|---|---|---|---|"]
    for each in sorted(results, key=lambda result: number_of(result.row)):
        cells = [each.row, each.promise, each.fault, each.limit, each.figure, verdict_of(each), measurement_of(each)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def measurement_of(result: Result) -> str:
    """Return when a row was measured, at which commit, and how much the machine was disturbed meanwhile."""
    if not result.date:
        return ""
    parts = [result.date, result.commit]
    if result.full:
        parts.append("all repetitions")
    if result.stall_ms:
        parts.append(f"woken {result.stall_ms:.0f} ms late, others {result.others:.0%}")
    if result.measurements > 1:
        parts.append(f"measured {result.measurements} times")
    return ", ".join(parts)


def summary(results: Sequence[Result]) -> str:
    """Return one sentence: how many rows passed, failed, and were not measured, and on which machine."""
    passed = sum(each.passed is True for each in results)
    failed = sum(each.passed is False for each in results)
    without = len(results) - passed - failed
    machines = list(dict.fromkeys(each.machine for each in results if each.machine))
    return f"{passed} rows passed, {failed} failed, {without} were not measured. Machine: {'; '.join(machines)}."


def with_table(page: str, results: Sequence[Result]) -> str:
    """Return the page with the results in place of those that it has. Raises `ValueError` without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{summary(results)}\n\n{table(results)}\n{END}{after}"


def merged(stored: Iterable[Result], found: Iterable[Result], rows: Sequence[Row]) -> list[Result]:
    """Return the results of all rows that exist: the new ones, and of others what is stored.

    A row that was never measured has a result that says so: none may be left out.
    """
    results = {each.row: each for each in (*stored, *found)}
    return [results[row.id] if row.id in results else unmeasured(row, "never yet") for row in rows]


def unmeasured(row: Row, reason: str) -> Result:
    """Return the result of a row that was not measured."""
    from tests.faults.row import Result

    return Result(row.id, row.promise, row.fault, row.limit, "", None, reason, "", "", "", False)
