"""An attacker: a process that sends what rows of the table say. The table of all rows stands here.

It reads orders as lines of JSON, and prints a line when all bytes are made, waits for another line, attacks, and prints
an `Outcome`. So what it takes to make the bytes disturbs no measurement.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from bench.heavy.exchange import Connections, Exchange, GrpcExchange, HttpExchange
from bench.heavy.grpc_rows import grpc_infer_rows, grpc_rpc_rows
from bench.heavy.http_rows import http_infer_rows, http_route_rows, medium_json_rows
from bench.heavy.openai_rows import openai_rows

if TYPE_CHECKING:
    from bench.heavy.attack import Attack, HeavyRow


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
    return [*http_infer_rows(), *medium_json_rows(), *http_route_rows(), *grpc_infer_rows(), *grpc_rpc_rows(),
            *openai_rows()]  # fmt: skip


def row_named(name: str) -> HeavyRow:
    """Return the row `name`. Raises `LookupError`."""
    for row in heavy_rows():
        if row.name == name:
            return row
    raise LookupError(f"there is no row {name!r}")


#: How much of a response is kept, in characters.
_TEXT_SIZE = 400


class Order(msgspec.Struct, frozen=True):
    """Attack like the row says, with bodies of about `byte_size`, at the port of its protocol."""

    row: str
    byte_size: int
    port: int
    timeout_s: float
    #: How long nothing must have moved before a paused attack continues.
    hold_s: float = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """What an attacker has got."""

    #: How many responses had which status.
    statuses: dict[str, int]
    #: The beginning of each different response.
    texts: list[str]
    #: From the first byte sent to the last response.
    seconds: float
    #: Requests that the server may have at the same time.
    at_once: int
    body_byte_size: int
    response_byte_size: int

    @property
    def status(self) -> str:
        """All different statuses."""
        return "+".join(sorted(self.statuses))


def run(attack: Attack, order: Order, protocol: str) -> Outcome:
    """Attack. Raises `OSError` if the server cannot be reached."""
    kind = GrpcExchange if protocol == "grpc" else HttpExchange
    exchanges: list[Exchange] = [
        # The requests of an attack have the type of its protocol.
        kind(attack.requests, keeps_end=attack.pauses_before_end, reads=not attack.pauses_before_reading)  # type: ignore[arg-type]  # as above
        for _ in range(attack.connections)
    ]
    began = time.perf_counter()
    connections = Connections(order.port, exchanges)
    try:
        if attack.pauses_before_end or attack.pauses_before_reading:
            connections.drive(began + order.timeout_s, order.hold_s)
            connections.go_on()
        connections.drive(began + order.timeout_s)
        seconds = time.perf_counter() - began
    finally:
        connections.close()
    return Outcome(
        statuses=dict(Counter(status for each in exchanges for status in each.statuses)),
        texts=[*dict.fromkeys(text[:_TEXT_SIZE] for each in exchanges for text in each.texts)],
        seconds=seconds,
        at_once=attack.at_once,
        body_byte_size=attack.byte_size,
        response_byte_size=sum(each.response_byte_size for each in exchanges),
    )


def main() -> None:
    """Follow orders until there are no more."""
    gc.disable()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        row = row_named(order.row)
        attack = row.build(order.byte_size)
        _say(b"ready")
        if not sys.stdin.buffer.readline():
            return
        _say(msgspec.json.encode(run(attack, order, row.protocol)))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
