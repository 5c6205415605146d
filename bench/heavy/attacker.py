"""An attacker: a process that sends what rows of the table say.

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

from bench.heavy.exchange import Connections, Exchange, HttpExchange
from bench.heavy.grpc_exchange import GrpcExchange
from bench.heavy.rows.table import row_named

if TYPE_CHECKING:
    from bench.heavy.attack import Attack


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
    kind = HttpExchange if protocol == "http" else GrpcExchange
    exchanges: list[Exchange] = [
        # The requests of an attack are those of its protocol.
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
