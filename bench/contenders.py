"""The servers that are compared, which run while a `with` block lasts, and one measurement of one of them.

They are our server and, if available, a real Triton; or our servers of two source trees. Rows with TLS have a
certificate that `openssl` makes for the run.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from bench.machine import ProcessTimes, cpu_times, cpu_times_of
from bench.rows import Row
from bench.server import ServerProcess, free_ports
from bench.triton import NotAvailable, triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.light_client import LightClient
    from bench.light_rows import LightRow
    from bench.rows import Analyzer, Figures


class TlsFlags(msgspec.Struct, frozen=True):
    """Flags of a server with TLS: for gRPC, which Triton knows too, and for HTTP, which only ours knows."""

    grpc: tuple[str, ...]
    http: tuple[str, ...]

    @property
    def both(self) -> tuple[str, ...]:
        return self.grpc + self.http


def missing_openssl() -> str:
    """Return why there can be no certificate on this machine, or nothing."""
    return "" if shutil.which("openssl") else "openssl is not installed, which makes the certificate"


def tls_flags(folder: Path) -> TlsFlags:
    """Make a certificate for 127.0.0.1 in `folder` and return the flags. Raises `NotAvailable`."""
    certificate, key = folder / "server.pem", folder / "server.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
        "-out", str(certificate),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"openssl has made no certificate: {done.stderr.strip().splitlines()[-1:]}")
    grpc, http = (
        (f"--{door}-use-ssl=true", f"--{door}-server-cert={certificate}", f"--{door}-server-key={key}")
        for door in ("grpc", "http")
    )
    return TlsFlags(grpc, http)


OURS, TRITON = "ours", "triton"


#: Flags of a server that starts although some models cannot be loaded.
_WITHOUT_SOME = ("--exit-on-error=false", "--strict-readiness=false")


class Contender(msgspec.Struct, frozen=True):
    """A server under load: its ports by protocol, and its process."""

    name: str
    ports: dict[str, int]
    pid: int
    #: Of OpenAI's API; 0 for a server without it.
    openai_port: int = 0

    def port_of(self, protocol: str) -> int:
        """Return the port of a protocol, which may be `openai`."""
        return self.openai_port if protocol == "openai" else self.ports[protocol]


class Measurement(msgspec.Struct, frozen=True):
    """The result of a row on one server, with the CPU time that the server has used for it."""

    figures: Figures
    #: Of the server's main process, our kernel.
    main: ProcessTimes
    #: Of its workers, for all requests.
    workers: ProcessTimes

    @property
    def cpu(self) -> ProcessTimes:
        return self.main + self.workers

    @property
    def main_us(self) -> float:
        """CPU time of the main process per request."""
        return self.main.total_s / self.figures.requests * 1e6


class Clients(msgspec.Struct, frozen=True):
    """The clients that rows need: perf_analyzer, unless no row is its own, and the light ones."""

    analyzer: Analyzer | None
    light: LightClient

    def measure(self, row: Row | LightRow, server: Contender) -> Measurement | str:
        """Measure a row on a server once. Returns the reason if there are no figures.

        A light client's row is checked and warmed up first, of which nothing is counted.
        """
        model = row.triton_model if server.name == TRITON and row.triton_model else row.model
        if isinstance(row, Row):
            analyzer = self.analyzer
            assert analyzer is not None, "rows of perf_analyzer need it"
            return _counted(server, lambda: analyzer.measure(row, model, server.ports[row.protocol]))
        load = self.light.prepare(row, model, server.ports)
        if isinstance(load, str):
            return load
        return _counted(server, lambda: self.light.measure(load))


def _counted(server: Contender, run: Callable[[], Figures | str]) -> Measurement | str:
    """Run a load, and count the CPU time that the server uses meanwhile."""
    main, everything = cpu_times_of(server.pid), cpu_times(server.pid)
    figures = run()
    if isinstance(figures, str):
        return figures
    # A client's windows follow one another from its start to its end, so it counts all but a few requests.
    main, everything = cpu_times_of(server.pid) - main, cpu_times(server.pid) - everything
    return Measurement(figures, main, everything - main)


@contextlib.contextmanager
def contenders(
    ours: Path, theirs: Path | None, *flags: str, our_flags: Sequence[str] = (), onnx_backend: Path | None = None
) -> Iterator[list[Contender]]:
    """Start our server over the repository `ours` and a Triton over `theirs`. `our_flags` are for ours only.

    `onnx_backend` is the folder of a C++ ONNX Runtime backend, which Triton then has.

    Yields ours first. Yields only ours if `theirs` is None, or if Triton is not available, with the reason on
    standard error.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(ours, *flags, *our_flags))
        found = [contender(OURS, server)]
        if theirs is not None:
            http_port, grpc_port, metrics_port = free_ports(3)
            try:
                pid = stack.enter_context(
                    triton(theirs, http_port, grpc_port, metrics_port, *flags, onnx_backend=onnx_backend)
                )
                found.append(Contender(TRITON, {"http": http_port, "grpc": grpc_port}, pid))
            except NotAvailable as error:
                print(f"not compared with Triton: {error}", file=sys.stderr)
        yield found


@contextlib.contextmanager
def trees_of_ours(trees: Mapping[str, Path], repository: Path, *flags: str) -> Iterator[list[Contender]]:
    """Start the server of each source tree over the same repository, in the order of `trees`, named by its keys.

    They get `flags` and those which every commit knows: for addresses and ports, and to start although an older commit
    lacks what one of the models needs. Raises `ServerFailed`.
    """
    with contextlib.ExitStack() as stack:
        yield [
            contender(name, stack.enter_context(ServerProcess(repository, *_WITHOUT_SOME, *flags, tree=tree)))
            for name, tree in trees.items()
        ]


def contender(name: str, server: ServerProcess) -> Contender:
    """Return a server of ours as a contender."""
    return Contender(name, {"http": server.http_port, "grpc": server.grpc_port}, server.pid, server.openai_port)
