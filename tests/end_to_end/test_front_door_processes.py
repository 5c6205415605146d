"""Front doors in processes of their own (--front-door-processes): the same responses, and what ends with a process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from bench.server import ServerProcess, wait_for
from tests.end_to_end.front_doors import (
    DOORS,
    door_metric,
    door_processes,
    door_requests,
    pending_requests,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


#: The connections of the test that runs.
_opened: list[http.client.HTTPConnection] = []


@pytest.fixture(autouse=True)
def close_connections() -> Iterator[None]:
    """Close what the test has opened by `connect`."""
    yield
    while _opened:
        _opened.pop().close()


def connect(server: ServerProcess) -> http.client.HTTPConnection:
    _opened.append(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60))
    return _opened[-1]


def send(
    connection: http.client.HTTPConnection, model: str, values: list[float], *, binary: bool = True, **fields: Any
) -> tuple[int, Any]:
    """Send a request with `values`; return the status, and the numbers of the output or the error."""
    shape: dict[str, Any] = {"name": "IN", "shape": [len(values)], "datatype": "FP32"}
    if binary:
        octets = struct.pack(f"<{len(values)}f", *values)
        shape["parameters"] = {"binary_data_size": len(octets)}
        head = json.dumps({"inputs": [shape], "parameters": {"binary_data_output": True}, **fields}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
    else:
        shape["data"] = values
        head, octets, headers = json.dumps({"inputs": [shape], **fields}).encode(), b"", {}
    connection.request("POST", f"/v2/models/{model}/infer", head + octets, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        return response.status, body
    if not binary:
        return 200, json.loads(body)["outputs"][0]["data"]
    data = body[int(response.headers["Inference-Header-Content-Length"]) :]
    return 200, list(struct.unpack(f"<{len(data) // 4}f", data))


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("count", [4, 2000, 40_000], ids=["inline", "copied to the arena", "received in the arena"])
@pytest.mark.parametrize("model", ["echo", "double"])
def test_a_door_responds_with_what_the_model_computes(
    door_server: ServerProcess, model: str, count: int, binary: bool
) -> None:
    connection = connect(door_server)
    factor = 2 if model == "double" else 1
    send(connection, model, [1.0], binary=binary)  # the doors learn the model
    before = door_requests(door_server)
    for first in range(5):
        values = [float((first * 7 + place) % 1000) for place in range(count)]
        assert send(connection, model, values, binary=binary) == (200, [factor * each for each in values])
    assert door_requests(door_server) - before >= 4


def test_requests_behind_each_other_on_one_connection_keep_their_order(door_server: ServerProcess) -> None:
    connection = connect(door_server)
    send(connection, "echo", [1.0])
    send(connection, "echo", [1.0])
    assert connection.sock is not None
    texts = []
    for number in range(20):
        body = json.dumps(
            {"id": str(number), "inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [number]}]}
        )
        texts.append(f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}")
    connection.sock.sendall("".join(texts).encode())
    received = b""
    while received.count(b'"outputs"') < 20:
        received += connection.sock.recv(1 << 16)
    assert re.findall(rb'"id":"(\d+)"', received) == [b"%d" % number for number in range(20)]


def test_other_calls_are_served_on_the_same_connection(door_server: ServerProcess) -> None:
    connection = connect(door_server)
    for _ in range(3):
        assert send(connection, "echo", [3.0]) == (200, [3.0])
        connection.request("GET", "/v2/models/echo/config")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["name"]) == (200, "echo")


def test_errors_are_those_of_the_kernel(door_server: ServerProcess) -> None:
    connection = connect(door_server)
    send(connection, "echo", [1.0])
    before = door_requests(door_server)
    body = b'{"inputs":[{"name":"WRONG","shape":[1],"datatype":"FP32","data":[1]}]}'
    seen = []
    for _ in range(2):
        connection.request("POST", "/v2/models/echo/infer", body)
        response = connection.getresponse()
        seen.append((response.status, response.headers["Content-Type"], response.read()))
    assert door_requests(door_server) > before
    (status, kind, text), _ = seen
    assert seen[0] == seen[1]
    assert (status, kind) == (400, "application/json")
    assert b"WRONG" in text
    connection.request("POST", "/v2/models/nobody/infer", body)
    response = connection.getresponse()
    assert response.status == 404
    assert b"unknown model: 'nobody'" in response.read()


def test_a_model_is_unloaded_and_loaded_again(door_server: ServerProcess) -> None:
    connection, admin = connect(door_server), connect(door_server)
    for _ in range(2):
        assert send(connection, "double", [4.0] * 4000) == (200, [8.0] * 4000)
        admin.request("POST", "/v2/repository/models/double/unload")
        assert admin.getresponse().read() == b""
        status, text = send(connection, "double", [4.0] * 4000)
        assert status in (400, 404, 503)
        assert b"double" in text
        admin.request("POST", "/v2/repository/models/double/load")
        response = admin.getresponse()
        assert (response.status, response.read()) == (200, b"")


def test_connections_are_spread_over_the_doors(door_server: ServerProcess) -> None:
    connections = [connect(door_server) for _ in range(8)]
    send(connections[0], "echo", [1.0])
    before = door_metric(door_server, "naiad_front_door_requests_total")
    for connection in connections:
        for _ in range(10):
            assert send(connection, "echo", [1.0])[0] == 200
    after = door_metric(door_server, "naiad_front_door_requests_total")
    counts = [after[number] - before[number] for number in after]
    assert len(counts) == DOORS
    assert max(counts) <= 2 * sum(counts) / DOORS
    for connection in connections:
        connection.close()


def test_what_the_kernel_serves_returns_to_it_and_leaves_nothing_behind(door_server: ServerProcess) -> None:
    """Descriptors and memory of the kernel and of the doors are as before."""
    processes = [psutil.Process(door_server.pid), *map(psutil.Process, door_processes(door_server).values())]

    def round_of_requests() -> None:
        for _ in range(20):
            connection = connect(door_server)
            send(connection, "echo", [1.0] * 5000)
            connection.request("GET", "/v2")
            connection.getresponse().read()
            send(connection, "double", [1.0] * 50_000)
            connection.close()

    round_of_requests()
    wait_for(lambda: sum(door_metric(door_server, "naiad_front_door_connections").values()) == 0)
    before = [each.num_fds() for each in processes]
    round_of_requests()
    wait_for(lambda: [each.num_fds() for each in processes] <= [count + 2 for count in before])


def test_a_client_that_leaves_cancels_its_request(door_server: ServerProcess) -> None:
    warm = connect(door_server)
    send(warm, "sleepy", [0.0])
    leaving = [connect(door_server) for _ in range(3)]
    for connection in leaving:
        body = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [0.3]}]})
        connection.request("POST", "/v2/models/sleepy/infer", body)
    for connection in leaving:
        connection.close()

    wait_for(lambda: pending_requests(door_server, "sleepy") == 0)
    assert send(warm, "sleepy", [0.0]) == (200, [0.0])


def test_requests_of_doors_are_traced_and_explained(door_models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    trace = [f"--trace-config={each}" for each in (f"triton,file={file}", "level=TIMESTAMPS", "rate=1", "count=-1")]
    with serving(door_models, *trace) as server:
        connection = connect(server)
        for number in range(5):
            assert send(connection, "echo", [1.0], id=f"traced {number}")[0] == 200
        body = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]})
        seen = []
        for _ in range(3):
            connection.request("POST", "/v2/models/echo/infer", body, {"X-Naiad-Explain": "1"})
            response = connection.getresponse()
            seen.append(json.loads(response.read())["parameters"].keys())
        assert door_requests(server) >= 6
        assert seen[0] == seen[1] == seen[2] != set()
    assert "traced 4" in file.read_text()


def test_access_lines_are_in_the_log_of_the_server(door_models: Path) -> None:
    with serving(door_models, "--log-access=true") as server:
        connection = connect(server)
        for number in range(4):
            assert send(connection, "echo", [1.0], id=f"access {number}")[0] == 200
        for number in range(4):
            server.wait_for_log(f"model=echo id=access {number}")
        assert door_requests(server) > 0


def test_killed_doors_take_only_their_own_connections(door_models: Path) -> None:
    """Under load, a door is killed again and again: clients of the other get all responses, and new ones connect."""
    with serving(door_models) as server:
        ended, wrong = threading.Event(), []
        lost = threading.Semaphore(0)

        def load() -> None:
            connection, number = connect(server), 0
            while not ended.is_set():
                number += 1
                values = [float(number % 1000)] * (4 if number % 3 else 20_000)
                try:
                    found = send(connection, "echo", values)
                except (OSError, http.client.HTTPException):
                    lost.release()
                    connection.close()  # the next request connects again
                    continue
                if found != (200, values):
                    wrong.append(found[0])

        def is_served() -> bool:
            try:
                return send(connect(server), "echo", [1.0]) == (200, [1.0])
            except ConnectionError:  # the door got it just before its end
                return False

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(4):  # a door that dies again soon is started with a delay
                number = turn % DOORS + 1
                wait_for(lambda number=number: number in door_processes(server))  # type: ignore[misc]
                wait_for(lambda number=number: door_metric(server, "naiad_front_door_ready")[number] == 1)  # type: ignore[misc]
                other = door_processes(server)[DOORS + 1 - number] if len(door_processes(server)) == DOORS else None
                os.kill(door_processes(server)[number], signal.SIGKILL)
                wait_for(is_served)
                if other is not None:
                    assert psutil.pid_exists(other)
                assert lost.acquire(timeout=60), "no connection was lost with its door"
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not wrong
        # Clients see the end of a door before the kernel has waited for its process.
        wait_for(lambda: "naiad_front_door_restarts_total 4" in server.get("/metrics", server.metrics_port)[1])
        wait_for(
            lambda: (
                'nv_inference_pending_request_count{model="echo",version="1"} 0'
                in server.get("/metrics", server.metrics_port)[1]
            )
        )
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_door_that_hangs_is_killed_and_started_again(door_models: Path) -> None:
    with serving(door_models) as server:
        before = door_processes(server)
        os.kill(before[1], signal.SIGSTOP)
        wait_for(lambda: not psutil.pid_exists(before[1]), timeout_s=60)
        server.wait_for_log("front door 1 has not responded for 10 s, and is killed")
        wait_for(lambda: door_metric(server, "naiad_front_door_ready") == {1: 1, 2: 1})
        assert door_processes(server)[2] == before[2]
        assert send(connect(server), "echo", [1.0]) == (200, [1.0])


def test_a_stopped_server_drains_its_doors(door_models: Path) -> None:
    """SIGTERM under load: a request in flight over a door gets its response, and all doors end."""
    with serving(door_models) as server:
        warm = connect(server)
        send(warm, "sleepy", [0.0])
        assert send(warm, "sleepy", [0.0]) == (200, [0.0])
        doors = door_processes(server)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(send(warm, "sleepy", [1.0])))
        before = door_requests(server)
        waiting.start()
        wait_for(lambda: door_requests(server) > before)
        assert server.stop() == 0
        waiting.join()
        assert found == [(200, [1.0])]
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in doors.values()))


def test_doors_end_with_a_kernel_that_is_killed(door_models: Path) -> None:
    with serving(door_models) as server:
        doors = door_processes(server)
        assert len(doors) == DOORS
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in doors.values()))


def test_options_that_doors_cannot_serve_are_refused(door_models: Path) -> None:
    from kernel.errors import BadOption
    from kernel.options import (
        GrpcOptions,
        HttpOptions,
        ListenAddress,
        RepositoryOptions,
        ServerOptions,
        TlsOptions,
        check_options,
    )

    repository = RepositoryOptions((door_models,))
    tls = HttpOptions(tls=TlsOptions(Path("cert"), Path("key")))
    grpc_tls = GrpcOptions(tls=TlsOptions(Path("cert"), Path("key")))
    closed = ListenAddress(False, "127.0.0.1", 0)
    with pytest.raises(BadOption, match="share memory with workers"):
        check_options(ServerOptions(repository, worker_shared_memory=False, front_door_processes=1))
    for without in (
        {"http": tls, "grpc": grpc_tls},
        {"http": tls, "grpc_listener": closed},
        {"grpc": grpc_tls, "http_listener": closed},
    ):
        with pytest.raises(BadOption, match="cannot serve ports with TLS"):
            check_options(ServerOptions(repository, front_door_processes=1, **without))  # type: ignore[arg-type]
    for one, protocols in (
        ({"http_listener": closed, "http": tls}, ["grpc"]),
        ({"http": tls}, ["grpc"]),
        ({"grpc": grpc_tls}, ["http"]),
        ({}, ["http", "grpc"]),
    ):
        options = ServerOptions(repository, front_door_processes=1, **one)
        check_options(options)
        assert options.protocols_of_front_doors == protocols
    with pytest.raises(BadOption, match="closes these ports"):
        check_options(ServerOptions(repository, http_listener=closed, grpc_listener=closed, front_door_processes=1))
