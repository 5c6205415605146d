"""All rows of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.heavy.grpc_rows import grpc_rows
from bench.heavy.http_rows import http_rows

if TYPE_CHECKING:
    from bench.heavy.attack import HeavyRow


def heavy_rows() -> list[HeavyRow]:
    """Return every row in the order of the report."""
    return [*http_rows(), *grpc_rows()]


def row_named(name: str) -> HeavyRow:
    """Return the row `name`. Raises `LookupError`."""
    for row in heavy_rows():
        if row.name == name:
            return row
    raise LookupError(f"there is no row {name!r}")
