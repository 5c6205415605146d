"""The lines that the fast path writes are made of the call, its head and its response."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from protocols.http.access_log import ConnectionAccessLog
from protocols.http.fast.call import FastCall
from protocols.http.fast.request_heads import HttpRequestHead
from protocols.http.fast.response_bytes import ResponseBytes
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.infer_call import HttpInference
from protocols.http.inference.prepared import InferRequestHead
from tests.protocols.http.fast.conversations import access_log_lines

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

TARGET = "/v2/models/echo/versions/1/infer?a=b"


class Transport:
    def get_extra_info(self, name: str) -> Any:
        assert name == "peername"
        return "::1", 5000, 0, 0


def call(kernel: Kernel) -> FastCall:
    head = InferRequestHead(kernel.route("echo"), "echo", "1", TARGET, 70, 60, IDENTITY)
    found = FastCall(HttpInference(kernel, 1 << 20), head, None)
    found.begin_ns, found.request_id = monotonic_ns(), "an id"
    return found


def test_a_line_has_the_peer_the_request_and_the_response(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        transport = Transport()
        log = ConnectionAccessLog(transport, access=True, verbose=False)  # type: ignore[arg-type]  # what it uses
        with access_log_lines() as lines:
            log.responded(call(kernel), ResponseBytes(b"head", [b"body"], status=400))
            log.client_gone(call(kernel))
            log.refused(HttpRequestHead(TARGET, 5), ResponseBytes(b"refused", status=403))
        begin = f"[::1]:5000 POST {TARGET}"
        assert lines == [
            f"{begin} 400 in=70 out=8 model=echo version=1 id=an id",
            f"{begin} 499 in=70 out=- model=echo version=1 id=an id",
            f"{begin} 403 in=5 out=7 model=echo version=1",
        ]

    with_kernel(test)
