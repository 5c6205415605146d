"""What one attacker sends: requests over HTTP or gRPC, as bytes, and when it stops on its way. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MIB = 1 << 20


class HttpRequest(msgspec.Struct, frozen=True):
    """One request over HTTP/1.1. `chunk_byte_size` above 0: chunked, with chunks of that size."""

    path: str
    body: bytes
    headers: dict[str, str] = {}
    chunk_byte_size: int = 0
    #: Whether the body waits for `100 Continue`.
    expects_continue: bool = False


class GrpcCall(msgspec.Struct, frozen=True):
    """One call: its messages, as they stand on the wire without the prefix of five bytes."""

    path: str
    messages: list[bytes]
    #: The `grpc-encoding` of all messages; empty for messages that are not compressed.
    encoding: str = ""
    headers: dict[str, str] = {}


class Attack(msgspec.Struct, frozen=True):
    """What one attacker sends on each of `connections` equal connections.

    Over HTTP each request waits for the response before it, over gRPC all calls begin at once.
    """

    requests: list[HttpRequest] | list[GrpcCall]
    connections: int = 1
    #: Stop, on all connections, before the last byte is sent, until nothing has moved for a while.
    pauses_before_end: bool = False
    #: The same before anything is read.
    pauses_before_reading: bool = False

    @property
    def at_once(self) -> int:
        """How many requests the server may have at the same time."""
        calls = sum(isinstance(each, GrpcCall) for each in self.requests)
        return self.connections * max(1, calls)

    @property
    def byte_size(self) -> int:
        """The bytes of all bodies, as they are sent."""
        return self.connections * sum(
            len(each.body) if isinstance(each, HttpRequest) else sum(map(len, each.messages)) for each in self.requests
        )


#: Makes an attack whose bodies have about as many bytes as the argument says.
BuildAttack = Callable[[int], Attack]


class HeavyRow(msgspec.Struct, frozen=True):
    """A row of the table: an attack, and how our server responds to it."""

    name: str
    protocol: str
    build: BuildAttack
    #: The status over HTTP or the name of the gRPC status, with "+" between them where responses may differ, and "|"
    #: between alternatives.
    status: str
    #: A regular expression that is found in the body of the response or in `grpc-message`.
    text: str = ""
    attackers: int = 1
    #: Whether the attack exceeds our server's budget for tensors and messages, beyond which the kernel may not grow.
    exceeds_budget: bool = False

    def accepts(self, status: str) -> bool:
        """Whether responses may have this status."""
        return status in self.status.split("|")
