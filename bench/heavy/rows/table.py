"""All rows of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.heavy.rows.grpc_inference import grpc_infer_rows
from bench.heavy.rows.grpc_rpcs import grpc_rpc_rows
from bench.heavy.rows.http_inference import http_infer_rows
from bench.heavy.rows.http_routes import http_route_rows
from bench.heavy.rows.medium_json import medium_json_rows

if TYPE_CHECKING:
    from bench.heavy.attack import HeavyRow


#: Rows that Triton is measured in, unless all are asked for: it takes a minute and more for some.
COMPARED = frozenset(
    {
        "http gzip bomb", "http empty strings", "http objects as data", "http generate: objects",
        "http index: objects", "http load: objects", "http dims of a shape", "http floats",
        "http binary in, JSON out", "grpc 4 million empty strings, 8 MiB", "grpc 300,000 parameters",
        "grpc int_contents, 16 MiB",
    }
)  # fmt: skip


def heavy_rows() -> list[HeavyRow]:
    """Return every row in the order of the report."""
    return [*http_infer_rows(), *medium_json_rows(), *http_route_rows(), *grpc_infer_rows(), *grpc_rpc_rows()]


def row_named(name: str) -> HeavyRow:
    """Return the row `name`. Raises `LookupError`."""
    for row in heavy_rows():
        if row.name == name:
            return row
    raise LookupError(f"there is no row {name!r}")
