"""The metrics port from outside, and what its options do."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kernel.errors import BadOption
from kernel.observe.metric_rules import MetricKind
from kernel.options import MetricsOptions
from kernel.server_parts import (
    DoorFigures,
    RecordFigures,
    RepositoryFigures,
    ServerPart,
    TraceFigures,
)
from kernel.serving.interface import CacheFigures
from protocols.http.metrics.server import MetricsServer
from protocols.http.server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

CPU = {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"}


def bound_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


class _Part(ServerPart):
    """A part with these figures."""

    def __init__(self, figures: object) -> None:
        self._figures = figures

    def figures(self) -> object:
        return self._figures


def page(kernel: Kernel, options: MetricsOptions = MetricsOptions()) -> str:  # noqa: B008 - it is frozen
    with bound_socket() as sock:
        return MetricsServer(kernel, sock, options).render().decode()


def test_the_page_is_one_that_prometheus_reads(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        kernel.server_parts.append(_Part(DoorFigures("grpc", 3, 17.5)))
        families = {family.name: family for family in text_string_to_metric_families(page(kernel))}
        successes = families["nv_inference_request_success"].samples
        assert {sample.labels["model"] for sample in successes} == {m.name for m in kernel.catalog.ready_models()}
        assert set(families) >= CPU
        (connections,) = families["naiad_server_open_connections"].samples
        assert (connections.labels, connections.value) == ({"protocol": "grpc"}, 3)
        total, used = (families[f"nv_cpu_memory_{part}_bytes"].samples[0].value for part in ("total", "used"))
        assert 0 < used < total
        (expiry,) = families["naiad_server_certificate_expiry_timestamp_seconds"].samples
        assert (expiry.labels, expiry.value) == ({"protocol": "grpc"}, 17.5)

    with_kernel(test)


def test_the_page_has_what_the_parts_of_the_server_say(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        before = page(kernel)
        assert "naiad_traces_total 0" in before
        assert "naiad_records_lost_total 0" in before
        assert "nv_cache_num_hits" not in before
        figures = (
            TraceFigures(5, 6), RecordFigures(7, 8), RepositoryFigures(9, 10.5, "It waits."), CacheFigures(3, 2), None,
        )  # fmt: skip
        kernel.server_parts.extend(map(_Part, figures))
        after = page(kernel).splitlines()
        for line in (
            "naiad_traces_total 5", "naiad_traces_lost_total 6", "naiad_records_total 7", "naiad_records_lost_total 8",
            "nv_cache_num_hits 2",
        ):  # fmt: skip
            assert line in after
        assert any(line.endswith(" 9") for line in after if line.startswith("naiad_") and "background" in line)
        assert any(line.endswith(" 10.5") for line in after if line.startswith("naiad_") and "poll" in line)

    with_kernel(test)


def test_every_line_ends_and_every_family_is_there_once(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        text = page(kernel)
        assert text.endswith("\n")
        lines = text.split("\n")[:-1]
        assert all(line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(("nv_", "naiad_")) for line in lines)
        heads = [line for line in lines if line.startswith("#")]
        assert len(heads) == len({" ".join(line.split(" ")[:3]) for line in heads})

    with_kernel(test)


def test_figures_of_the_machine_can_be_left_out(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        assert "nv_cpu_" not in page(kernel, MetricsOptions(allow_cpu_metrics=False))

    with_kernel(test)


def test_families_that_models_define_follow_and_one_that_clashes_is_logged_once(
    with_kernel: WithKernel, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(kernel: Kernel) -> None:
        for model, kind in zip(kernel.catalog.ready_models(), (MetricKind.COUNTER, MetricKind.GAUGE), strict=False):
            custom = model.statistics.custom
            custom.hold(custom.define("app_requests", "requests of the app", kind), (("user", "a"),), ()).value += 3
        with bound_socket() as sock, caplog.at_level(logging.ERROR):
            server = MetricsServer(kernel, sock)
            pages = [server.render().decode() for _ in range(2)]
        assert pages[0].count('# TYPE app_requests counter\napp_requests{user="a"} 3\n') == 1
        assert "# TYPE app_requests gauge" not in pages[0]
        assert [message for message in caplog.messages if "'app_requests'" in message] == caplog.messages
        assert len(caplog.messages) == 1

    with_kernel(test)


def test_kinds_of_latencies_are_switched_by_the_configuration(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        options = MetricsOptions(config=("counter_latencies=false", "summary_latencies=true"))
        text = page(kernel, options)
        assert "nv_inference_request_duration_us" not in text
        assert "# TYPE nv_inference_request_summary_us summary" in text

    with_kernel(test)


def test_a_bad_configuration_is_refused_before_the_start(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        with pytest.raises(BadOption, match="--metrics-config option format is <setting>=<value>. Got foo"):
            page(kernel, MetricsOptions(config=("foo",)))

    with_kernel(test)


def test_what_has_no_effect_is_logged(with_kernel: WithKernel, caplog: pytest.LogCaptureFixture) -> None:
    async def test(kernel: Kernel) -> None:
        page(kernel, MetricsOptions(config=("summary_quantiles=0.9",)))
        assert [record.getMessage() for record in caplog.records] == [
            "Invalid option: [0.9]. No ':' delimiter found. Expected format is <quantile>:<error>"
        ]

    with_kernel(test)


def test_the_metrics_port_serves_get_only(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        sock = bound_socket()
        server = MetricsServer(kernel, sock)
        assert server.title == f"Metrics Service at 127.0.0.1:{sock.getsockname()[1]}"
        await server.start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
            for path in ("/metrics", "/metrics/", "/metrics?x=1"):
                async with session.get(path) as response:
                    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
                    assert "nv_inference_count" in await response.text()
            async with session.get("/other") as response:
                assert (response.status, await response.read()) == (200, b"")
            async with session.post("/metrics") as response:
                assert (response.status, await response.read()) == (405, b'{"error":"Method Not Allowed"}')
        await server.stop(1.0)

    with_kernel(test)


def test_scrapers_that_prefer_openmetrics_get_it(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        sock = bound_socket()
        server = MetricsServer(kernel, sock)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/metrics"
        await server.start()
        try:
            async with aiohttp.ClientSession() as client:
                for accept, media_type, ends in (
                    (
                        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
                        "application/openmetrics-text",
                        True,
                    ),
                    ("text/plain", "text/plain", False),
                    ("*/*", "text/plain", False),
                ):
                    async with client.get(url, headers={"Accept": accept}) as response:
                        assert response.content_type == media_type
                        assert response.headers["Vary"] == "Accept"
                        assert (await response.text()).endswith("# EOF\n") is ends
        finally:
            await server.stop(0)

    with_kernel(test)


@pytest.mark.parametrize("fast_path", [True, False])
def test_connections_are_counted_once_with_and_without_the_fast_path(with_kernel: WithKernel, fast_path: bool) -> None:
    async def test(kernel: Kernel) -> None:
        sock = bound_socket()
        server = HttpServer(kernel, sock, fast_path=fast_path)
        await server.start()
        assert server.figures().connections == 0
        clients = [await asyncio.open_connection(*sock.getsockname()) for _ in range(2)]
        for head in ("GET /v2 HTTP/1.1", "POST /v2/models/echo/infer HTTP/1.1"):
            for reader, writer in clients:
                writer.write(f"{head}\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode())
                assert b"\r\n\r\n" in await reader.readuntil(b"}")
            assert server.figures().connections == 2
        for _, writer in clients:
            writer.close()
            await writer.wait_closed()
        await server.stop(1.0)
        assert server.figures().connections == 0

    with_kernel(test)


def test_a_server_that_was_not_started_can_be_stopped(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        with bound_socket() as sock:
            await MetricsServer(kernel, sock).stop(1.0)

    with_kernel(test)
