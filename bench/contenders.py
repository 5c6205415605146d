"""The servers that are compared, all of them running while a block lasts, and one measurement of one of them.

They are ours and a real Triton where it can be had, or two source trees of ours.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from bench.machine import ProcessTimes, cpu_times, cpu_times_of
from bench.server import ServerProcess, free_ports
from bench.triton import NotAvailable, triton

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.rows import Analyzer, Figures, Row

OURS, TRITON = "ours", "triton"


class Contender(msgspec.Struct, frozen=True):
    """A server under load: its ports by protocol, and its process."""

    name: str
    ports: dict[str, int]
    pid: int


class Measurement(msgspec.Struct, frozen=True):
    """What one load of a row showed on one server, with the CPU time that the server took for it."""

    figures: Figures
    #: Of the server's main process, our kernel.
    main: ProcessTimes
    #: Of its workers, for all requests of the load.
    workers: ProcessTimes

    @property
    def cpu(self) -> ProcessTimes:
        return self.main + self.workers

    @property
    def main_us(self) -> float:
        """CPU time of the main process for a request."""
        return self.main.total_s / self.figures.requests * 1e6


def measure(analyzer: Analyzer, row: Row, server: Contender) -> Measurement | str:
    """Load a server with a row. Returns why there are no figures where there are none."""
    model = row.triton_model if server.name == TRITON and row.triton_model else row.model
    main, everything = cpu_times_of(server.pid), cpu_times(server.pid)
    figures = analyzer.measure(row, model, server.ports[row.protocol])
    if isinstance(figures, str):
        return figures
    # perf_analyzer's windows follow one another from its start to its end: it has counted all but a few requests.
    main, everything = cpu_times_of(server.pid) - main, cpu_times(server.pid) - everything
    return Measurement(figures, main, everything - main)


@contextlib.contextmanager
def contenders(
    ours: Path, theirs: Path | None, *flags: str, our_flags: Sequence[str] = ()
) -> Iterator[list[Contender]]:
    """Start our server over the repository `ours` and a Triton over `theirs`, with the same flags and some for ours.

    Gives ours first, and ours alone where `theirs` is None or Triton cannot be had (standard error says why).
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(ours, *flags, *our_flags))
        found = [_contender(OURS, server)]
        if theirs is not None:
            http_port, grpc_port, metrics_port = free_ports(3)
            try:
                pid = stack.enter_context(triton(theirs, http_port, grpc_port, metrics_port, *flags))
                found.append(Contender(TRITON, {"http": http_port, "grpc": grpc_port}, pid))
            except NotAvailable as error:
                print(f"no Triton to compare with: {error}", file=sys.stderr)
        yield found


@contextlib.contextmanager
def trees_of_ours(trees: Mapping[str, Path], repository: Path) -> Iterator[list[Contender]]:
    """Start the server of each source tree over the same repository, in the order of `trees`, named by its keys.

    They get no flags but addresses and ports, which every commit knows. Raises `ServerFailed`.
    """
    with contextlib.ExitStack() as stack:
        yield [
            _contender(name, stack.enter_context(ServerProcess(repository, tree=tree))) for name, tree in trees.items()
        ]


def _contender(name: str, server: ServerProcess) -> Contender:
    return Contender(name, {"http": server.http_port, "grpc": server.grpc_port}, server.pid)
