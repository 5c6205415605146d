"""A client whose request finds the queue full is refused, and learns when it may come again."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from bench.server import ServerProcess, wait_for
from tests.faults.client import SERVICE, number_body, number_message
from tests.faults.models import write_obey
from tests.faults.requests import ask
from tests.faults.soak.holdings import sums_of_metrics

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "max_batch_size: 1\ndynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"
#: An order to the model: execute for a minute, or until the server stops.
LONG = -60_000


def test_a_refusal_of_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    write_obey(tmp_path, instances=1, config=CONFIG)
    with ServerProcess(tmp_path, "--exit-timeout-secs=0") as server:
        clients = []
        for waiting in (0, 1):
            clients.append(threading.Thread(target=ask, args=(server, LONG)))
            clients[-1].start()

            def pending(count: int = waiting + 1) -> bool:
                found = sums_of_metrics(server.get("/metrics", server.metrics_port)[1])
                return found.get("naiad_inference_in_flight_requests") == count

            wait_for(pending)
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v2/models/obey/infer", number_body(1))
            response = connection.getresponse()
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert json.loads(response.read())["error"].endswith("Exceeds maximum queue size")
        with grpc.insecure_channel(server.grpc_url) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"{SERVICE}ModelInfer")(number_message("obey", 1), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        server.terminate()
        for client in clients:
            client.join()
