"""Spans through a real collector of OpenTelemetry, which nobody here has written: rotel, of which PyPI has a wheel.

`make test-collector` runs this with rotel; without it, it is skipped. What the collector passes on is received again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, free_ports, wait_for
from tests.end_to_end.traced_models import AROUND, CALLER, CALLS, PLUS_ONE, TENSORS, flags, infer, ways
from tests.kernel.records.collector import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow


@pytest.fixture
def rotel() -> str:
    """The path of the collector's program."""
    spec = importlib.util.find_spec("rotel")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, "rotel-agent")
        if path.is_file():
            if not os.access(path, os.X_OK):
                path.chmod(0o755)  # wheels do not always keep it
            return str(path)
    found = shutil.which("rotel") or shutil.which("rotel-agent")
    if found is None:
        pytest.skip("rotel, a collector of OpenTelemetry, is not installed: make test-collector")
    return found


@contextlib.contextmanager
def running(program: str, receiver: str, log: Path) -> Iterator[int]:
    """Run the collector, which passes all spans on to `receiver`; yields the port on which it takes OTLP/HTTP."""
    http_port, grpc_port = free_ports(2)
    command = [
        program, "start", f"--otlp-http-endpoint=127.0.0.1:{http_port}", f"--otlp-grpc-endpoint=127.0.0.1:{grpc_port}",
        "--exporter=otlp", "--otlp-exporter-protocol=http", f"--otlp-exporter-endpoint=http://{receiver}",
        "--batch-timeout=100ms",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: process.poll() is not None or _listens(http_port))
            assert process.poll() is None, log.read_text(errors="replace")
            yield http_port
        finally:
            process.terminate()
            process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_request_through_an_ensemble_to_a_model_that_a_model_calls_is_one_trace_in_a_real_collector(
    rotel: str, write_model: Callable[[str, str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    write_model("plus_one", TENSORS, PLUS_ONE)
    models = write_model("calls", TENSORS, CALLS)
    log = tmp_path_factory.mktemp("rotel") / "log"
    (models / "around" / "1").mkdir(parents=True)
    (models / "around" / "config.pbtxt").write_text(AROUND)
    with (
        Collector() as collector,
        running(rotel, collector.url.removesuffix("/v1/traces"), log) as port,
        ServerProcess(
            models, *flags("rate=1", "level=TIMESTAMPS", "mode=opentelemetry",
                           f"opentelemetry,url=127.0.0.1:{port}/v1/traces", "opentelemetry,bsp_schedule_delay=50")
        ) as server,
    ):  # fmt: skip
        assert infer(server, "around", [1], traceparent=CALLER, tracestate="a=b")[0] == 200
        assert infer(server, "plus_one", [-1], "fails")[0] == 500
        spans = collector.wait(9)
    assert len(spans) == 9
    whole = [span for span in spans if span.trace_id == CALLER[3:35]]
    outer, calls = "around < InferRequest", "calls < around < InferRequest"
    assert sorted(ways(whole)) == sorted(
        (way, CALLER[36:52])
        for way in ["InferRequest", outer, calls, f"compute < {calls}", f"plus_one < {calls}",
                    f"compute < plus_one < {calls}"]
    )  # fmt: skip
    assert {span.state for span in whole} == {"a=b"}
    assert {span.resource["service.name"] for span in spans} == {"triton-inference-server"}
    failed = [span for span in spans if span.trace_id != CALLER[3:35]]
    assert len({span.trace_id for span in failed}) == 1
    assert {span.error for span in failed if span.name != "compute"} == {"minus one"}
