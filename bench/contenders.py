"""The servers that are compared: ours, and a real Triton where it can be had, both running while the block lasts."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from bench.server import ServerProcess, free_ports
from bench.triton import NotAvailable, triton

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

OURS, TRITON = "ours", "triton"


class Contender(msgspec.Struct, frozen=True):
    """A server under load: its ports by protocol, and its process."""

    name: str
    ports: dict[str, int]
    pid: int


@contextlib.contextmanager
def contenders(
    ours: Path, theirs: Path | None, *flags: str, our_flags: Sequence[str] = ()
) -> Iterator[list[Contender]]:
    """Start our server over the repository `ours` and a Triton over `theirs`, with the same flags and some for ours.

    Gives ours first, and ours alone where `theirs` is None or Triton cannot be had (standard error says why).
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(ours, *flags, *our_flags))
        found = [Contender(OURS, {"http": server.http_port, "grpc": server.grpc_port}, server.pid)]
        if theirs is not None:
            http_port, grpc_port, metrics_port = free_ports(3)
            try:
                pid = stack.enter_context(triton(theirs, http_port, grpc_port, metrics_port, *flags))
                found.append(Contender(TRITON, {"http": http_port, "grpc": grpc_port}, pid))
            except NotAvailable as error:
                print(f"no Triton to compare with: {error}", file=sys.stderr)
        yield found
