"""One limit of memory for all models: a request beyond it is refused, and the next that fits is served."""

from __future__ import annotations

import contextlib
import re
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

ADDS_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""

LIMIT = 1 << 20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_beyond_the_limit_are_refused_and_cost_the_others_nothing(
    protocol: str, write_model: WriteModel
) -> None:
    write_model("a", CONFIG, ADDS_ONE)
    with ServerProcess(write_model("b", CONFIG, ADDS_ONE), f"--memory-byte-size={LIMIT}") as server:
        module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        client = module.InferenceServerClient(server.url if protocol == "http" else server.grpc_url)

        def ask(model: str, byte_size: int) -> Any:
            given = module.InferInput("IN", [byte_size], "UINT8")
            given.set_data_from_numpy(np.full(byte_size, 7, np.uint8))
            return client.infer(model, [given]).as_numpy("OUT")

        for model in "ab" * 10:
            with pytest.raises(InferenceServerException) as refused:
                ask(model, LIMIT + 1)
            assert re.fullmatch(
                rf"a message of \d+ bytes is larger than all memory .* \(--memory-byte-size={LIMIT}\)",
                refused.value.message(),
            )
            assert refused.value.status() == ("503" if protocol == "http" else "StatusCode.RESOURCE_EXHAUSTED")
            assert (ask(model, 300_000) == 8).all()
        server.wait_for_log("a request is refused: a message of")
        assert "\nnaiad_server_memory_refusals_total 20\n" in server.get("/metrics", server.metrics_port)[1]
        client.close()


GROWS = """
class TritonPythonModel:
    def execute(self, requests):
        sizes = [int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]) << 16 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(size, np.uint8))]) for size in sizes]
"""


def test_responses_that_are_not_read_take_no_more_than_the_limit_and_the_server_goes_on_when_they_are_gone(
    write_model: WriteModel,
) -> None:
    body = b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[1],"data":[64]}],"outputs":[{"name":"OUT",'
    body += b'"parameters":{"binary_data":true}}]}'
    head = b"POST /v2/models/grows/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    limit = 32 << 20
    with ServerProcess(write_model("grows", CONFIG, GROWS), f"--memory-byte-size={limit}") as server:
        host, _, port = server.url.partition(":")
        connections = []
        statuses = []
        for _ in range(30):  # 4 MiB each
            connection = socket.socket()
            connections.append(connection)
            # Else the system takes a whole response, as it does for clients that read slowly.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + body)
            start = connection.recv(1024)
            statuses.append(start.split(b" ", 2)[1])
            if statuses[-1] == b"503":
                assert b"\r\nRetry-After: 1\r\n" in start
                assert b"no memory left: tensors of other requests take all of it; try again later" in start
        served = statuses.count(b"200")
        assert served < 30, "responses beyond the limit were made"
        assert served >= limit // (4 << 20) - 1
        assert set(statuses[served:]) == {b"503"}
        for connection in connections:
            connection.close()
        client = tritonclient.http.InferenceServerClient(server.url)
        given = tritonclient.http.InferInput("IN", [1], "UINT8")
        given.set_data_from_numpy(np.full(1, 64, np.uint8))
        assert once_it_works(lambda: client.infer("grows", [given]).as_numpy("OUT").size == 64 << 16)
        client.close()


def once_it_works(works: Callable[[], bool]) -> bool:
    """Try until it works: the server sees that a client has gone when it writes to it."""
    found: list[bool] = []

    def has_worked() -> bool:
        with contextlib.suppress(InferenceServerException):
            found.append(works())
        return bool(found)

    wait_for(has_worked)
    return found[-1]
