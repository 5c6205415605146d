"""The rows of load with perf_analyzer, and the run of one."""

from __future__ import annotations

import re
import resource
import subprocess
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20

#: The group of rows with perf_analyzer. Each group has its own geometric mean.
PERF_ANALYZER = "perf_analyzer"


class Row(msgspec.Struct, frozen=True):
    """A load with `concurrency` requests always in flight. The model may differ between the servers."""

    name: str
    model: str
    protocol: str
    concurrency: int
    extra: tuple[str, ...] = ()
    #: The model that Triton runs in this row; empty for the same one.
    triton_model: str = ""

    @property
    def group(self) -> str:
        return PERF_ANALYZER

    @property
    def tls(self) -> bool:
        """Whether the server's ports have TLS in this row."""
        return False

    @property
    def on_triton(self) -> bool:
        """Whether Triton can serve the row."""
        return True


def all_rows() -> list[Row]:
    """Return every row with perf_analyzer in the order of the report. `light_rows` returns the others."""
    table: list[Row] = []
    for protocol in ("http", "grpc"):
        table += [Row(f"small {protocol} c={c}", "add_sub", protocol, c) for c in (1, 8, 32)]
        table += [Row(f"batched {protocol} c={c}", "identity", protocol, c, ("--shape", "INPUT0:16")) for c in (8, 32)]
        for size, label in ((MIB, "1M"), (16 * MIB, "16M")):
            shape = ("--shape", f"INPUT0:{size // 4}")
            shm = ("--shared-memory", "system", "--output-shared-memory-size", str(size))
            table += [Row(f"{label} body {protocol} c={c}", "identity", protocol, c, shape) for c in (1, 4)]
            table += [Row(f"{label} shm {protocol} c={c}", "identity", protocol, c, shape + shm) for c in (1, 4)]
        table += [Row(f"ensemble {protocol} c={c}", "pipeline", protocol, c) for c in (1, 4)]
        table.append(Row(f"16M ensemble shm {protocol} c=1", "pipeline_large", protocol, 1, shape + shm))
        table.append(Row(f"call of another model {protocol} c=4", "calls", protocol, 4))
        table.append(Row(f"queue delay {protocol} c=4", "delayed", protocol, 4))
        table += [Row(f"onnx {protocol} c={c}", "add_sub_onnx", protocol, c, triton_model="add_sub") for c in (1, 8)]
    table.append(Row("small grpc stream c=8", "add_sub", "grpc", 8, ("--streaming",)))
    table.append(Row("decoupled grpc stream c=4", "repeat", "grpc", 4, ("--streaming",)))
    return table


class Figures(msgspec.Struct, frozen=True):
    """Requests per second and latencies, the number of requests behind them, and the CPU time of perf_analyzer.

    The CPU time is that from perf_analyzer's start to its end.
    """

    rate: float
    p50_us: float
    p99_us: float
    requests: int
    client_cpu_s: float = 0.0


_REPORT = {
    "rate": re.compile(r"Throughput: ([\d.]+) infer/sec"),
    "p50_us": re.compile(r"p50 latency: (\d+) usec"),
    "p99_us": re.compile(r"p99 latency: (\d+) usec"),
    "requests": re.compile(r"Request count: (\d+)"),
}


def parse_report(text: str) -> Figures | str:
    """Return the figures in perf_analyzer's report on one load, or its last line if it has none.

    With `-r 3 -s 999` the figures cover all three windows.
    """
    found = {name: pattern.search(text) for name, pattern in _REPORT.items()}
    numbers = {name: float(match[1]) for name, match in found.items() if match}
    if len(numbers) < len(found):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "perf_analyzer printed nothing"
    return Figures(numbers["rate"], numbers["p50_us"], numbers["p99_us"], int(numbers["requests"]))


class Analyzer(msgspec.Struct, frozen=True):
    """perf_analyzer, which measures three windows of `window_s` seconds."""

    binary: Path
    environment: dict[str, str]
    window_s: float = 1.0

    def measure(self, row: Row, model: str, port: int) -> Figures | str:
        """Return the figures of a row on the server at `port`, or the reason why there are none."""
        command = [
            str(self.binary), "-m", model, "-i", row.protocol, "-u", f"127.0.0.1:{port}",
            "--concurrency-range", str(row.concurrency), "-p", str(int(self.window_s * 1000)), "-s", "999", "-r", "3",
            *row.extra,
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=self.window_s * 20 + 60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "perf_analyzer did not end"
        figures = parse_report(done.stdout + done.stderr)
        if isinstance(figures, str):
            return figures
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return msgspec.structs.replace(figures, client_cpu_s=spent_s)
