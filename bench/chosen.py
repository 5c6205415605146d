"""Which rows a run measures, which it leaves out and why, and which of them need the same servers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from bench.contenders import missing_openssl
from bench.light import missing
from bench.light_rows import CPP, LightRow, light_rows
from bench.rows import Row, all_rows

AnyRow: TypeAlias = Row | LightRow


class Chosen(msgspec.Struct, frozen=True):
    """The rows of a run in the order of the report, and the reasons of those that cannot be measured, by name."""

    rows: list[AnyRow]
    skipped: dict[str, str]

    @property
    def need_perf_analyzer(self) -> bool:
        return any(isinstance(row, Row) for row in self.rows)

    @property
    def need_tls(self) -> bool:
        return any(row.tls for row in self.rows)

    def print_skipped(self) -> None:
        """Print each reason with the rows that it concerns."""
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, each in self.skipped.items() if each == reason]
            print(f"{len(names)} rows are skipped ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}")


def matches(only: str, name: str) -> bool:
    """Return whether a name contains one of the comma-separated patterns of `only`. Nothing matches every name."""
    patterns = [each.strip() for each in only.split(",") if each.strip()]
    return not patterns or any(each in name for each in patterns)


def choose(only: str, *, no_cpp: str = "") -> Chosen:
    """Return the rows whose names match. `no_cpp` is why those with Triton's C++ backend cannot be measured."""
    rows: list[AnyRow] = []
    skipped: dict[str, str] = {}
    every: list[AnyRow] = [*all_rows(), *light_rows()]
    for row in every:
        if not matches(only, row.name):
            continue
        if reason := _reason_to_skip(row, no_cpp):
            skipped[row.name] = reason
        else:
            rows.append(row)
    return Chosen(rows, skipped)


def _reason_to_skip(row: AnyRow, no_cpp: str) -> str:
    if isinstance(row, Row):
        return ""
    if row.group == CPP and no_cpp:
        return no_cpp
    return missing(row.protocol) or (missing_openssl() if row.tls else "")


def by_servers(rows: list[AnyRow]) -> list[list[AnyRow]]:
    """Return the rows in lists that need the same servers: those without TLS, then those with it."""
    plain, tls = ([row for row in rows if row.tls is wanted] for wanted in (False, True))
    return [each for each in (plain, tls) if each]
