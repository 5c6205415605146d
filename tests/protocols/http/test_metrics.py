from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from kernel.observe.statistics import Duration
from protocols.http.metrics import MetricsServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.router import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]


def bound_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def test_counters_are_rendered_with_tritons_names_and_labels(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        model = kernel.resolve("echo")
        model.spec = msgspec.structs.replace(model.spec, metric_tags={"team": 'a"b\\'})
        statistics = model.statistics
        statistics.success = Duration(3, 5_999)
        statistics.failures["BACKEND"] = 2
        statistics.pending = 4
        statistics.workers_lost = 1
        statistics.load_ns = 1_500_000_000
        with bound_socket() as sock:
            lines = MetricsServer(kernel, sock).render().decode().splitlines()
        labels = '_team="a\\"b\\\\",model="echo"'
        for line in (
            "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
            "# TYPE nv_inference_request_success counter",
            f'nv_inference_request_success{{{labels},version="1"}} 3',
            f'nv_inference_request_duration_us{{{labels},version="1"}} 5',
            f'nv_inference_request_failure{{{labels},reason="BACKEND",version="1"}} 2',
            f'nv_inference_request_failure{{{labels},reason="OTHER",version="1"}} 0',
            "# TYPE nv_inference_pending_request_count gauge",
            f'nv_inference_pending_request_count{{{labels},version="1"}} 4',
            f'nv_model_load_duration_secs{{{labels},version="1"}} 1.5',
            f'nv_model_instance_count{{{labels},version="1"}} 1',
            f'nv_worker_lost_count{{{labels},version="1"}} 1',
            "# TYPE nv_cpu_utilization gauge",
        ):
            assert line in lines, line
        assert all(line.startswith(("#", "nv_")) for line in lines if line)

    with_kernel(test)


def test_the_metrics_port_answers_only_get(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        sock = bound_socket()
        server = MetricsServer(kernel, sock)
        assert server.title == f"Metrics Service at 127.0.0.1:{sock.getsockname()[1]}"
        await server.start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
            for path in ("/metrics", "/metrics/", "/metrics?x=1"):
                async with session.get(path) as reply:
                    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
                    assert "nv_inference_count" in await reply.text()
            async with session.get("/other") as reply:
                assert (reply.status, await reply.read()) == (200, b"")
            async with session.post("/metrics") as reply:
                assert (reply.status, await reply.read()) == (405, b'{"error":"Method Not Allowed"}')
        await server.stop(1.0)

    with_kernel(test)


def test_a_server_that_was_not_started_can_be_stopped(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        with bound_socket() as sock:
            await MetricsServer(kernel, sock).stop(1.0)

    with_kernel(test)
