"""gRPC over front doors in processes of their own: what they serve, what they pass on, and what ends with one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import threading
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest

from bench.server import ServerProcess, wait_for
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.end_to_end.front_doors import (
    DOORS,
    door_metric,
    door_processes,
    door_requests,
    pending_requests,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_SERVICE = "/inference.GRPCInferenceService/"

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]

_TIMEOUT_S = 60

#: What clients call it when their connection is lost, depending on what they were doing.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


class Client:
    """A channel of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", _OPTIONS)
        self.infer: Any = self._unary("ModelInfer", pb.ModelInferResponse)

    def _unary(self, name: str, response: Any) -> Any:
        return self.channel.unary_unary(
            _SERVICE + name, lambda message: message.SerializeToString(), response.FromString
        )

    def call(self, request: Any, **options: Any) -> Any:
        """Make the call that the type of its message is named after."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        return self._unary(name, getattr(pb, f"{name}Response"))(request, timeout=_TIMEOUT_S, **options)

    def numbers(self, model: str, values: list[float], **more: Any) -> list[float]:
        """Send a request, and return the numbers of its response."""
        return numbers_of(self.infer(request(model, values, **more), timeout=_TIMEOUT_S))

    def stream(self, requests: Iterable[pb.ModelInferRequest], **options: Any) -> Any:
        stream = self.channel.stream_stream(
            _SERVICE + "ModelStreamInfer",
            lambda message: message.SerializeToString(),
            pb.ModelStreamInferResponse.FromString,
        )
        return stream(iter(requests), timeout=_TIMEOUT_S, **options)


@pytest.fixture
def client(door_server: ServerProcess) -> Iterator[Client]:
    made = Client(door_server)
    yield made
    made.channel.close()


def request(model: str, values: list[float], *, typed: bool = False, **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[len(values)])
    made = pb.ModelInferRequest(model_name=model, inputs=[tensor], **more)
    if typed:
        made.inputs[0].contents.fp32_contents.extend(values)
    else:
        made.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
    return made


def numbers_of(response: pb.ModelInferResponse) -> list[float]:
    (octets,) = response.raw_output_contents
    return list(struct.unpack(f"<{len(octets) // 4}f", octets))


def some_numbers(count: int) -> list[float]:
    return [float(number % 1000) for number in range(count)]


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
@pytest.mark.parametrize("count", [4, 2000, 40_000], ids=["inline", "copied", "received"])
@pytest.mark.parametrize("model", ["echo", "double"])
def test_a_response_has_what_the_model_computes(client: Client, model: str, count: int, typed: bool) -> None:
    factor, values = 2 if model == "double" else 1, some_numbers(count)
    wanted = [factor * each for each in values]
    for _ in range(3):
        assert client.numbers(model, values, typed=typed) == wanted


def test_a_large_tensor_is_passed_on_until_the_door_has_memory_for_it(door_server: ServerProcess) -> None:
    client, values = Client(door_server), some_numbers(3_000_000)
    before = door_requests(door_server)
    assert client.numbers("echo", values) == values
    wait_for(lambda: client.numbers("echo", values) == values and door_requests(door_server) > before)
    client.channel.close()


def test_small_requests_are_served_by_the_doors(door_server: ServerProcess, client: Client) -> None:
    client.numbers("echo", [1.0])
    before = door_requests(door_server)
    for count in (4, 4, 4, 2000, 2000, 40_000, 40_000):
        client.numbers("echo", some_numbers(count))
    assert door_requests(door_server) - before == 7


def test_calls_that_a_door_passes_on_get_the_responses_of_the_kernel(client: Client) -> None:
    assert client.call(pb.ServerMetadataRequest()).name == "triton"
    assert client.call(pb.ModelMetadataRequest(name="echo")).inputs[0].name == "IN"
    assert client.call(pb.ModelConfigRequest(name="echo")).config.name == "echo"
    assert client.call(pb.ModelStatisticsRequest(name="echo")).model_stats[0].name == "echo"
    assert {each.name for each in client.call(pb.RepositoryIndexRequest()).models} >= {"echo", "double"}
    with pytest.raises(grpc.RpcError) as refused:
        client.call(pb.ModelMetadataRequest(name="nobody"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "unknown model: 'nobody'" in refused.value.details()
    with pytest.raises(grpc.RpcError) as unknown:
        client.channel.unary_unary(_SERVICE + "Nothing", lambda octets: octets, lambda octets: octets)(b"")
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_inference_that_a_door_does_not_serve_is_passed_on(door_server: ServerProcess, client: Client) -> None:
    """An unknown model, a decoupled one, and messages that are compressed and large."""
    for values in ([1.0], some_numbers(100_000)):
        with pytest.raises(grpc.RpcError) as refused:
            client.numbers("nobody", values)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as decoupled:
            client.numbers("several", values)
        assert decoupled.value.code() is grpc.StatusCode.UNIMPLEMENTED
    before = door_requests(door_server)
    values = some_numbers(300_000)
    compressed = client.infer(request("echo", values), timeout=_TIMEOUT_S, compression=grpc.Compression.Gzip)
    assert numbers_of(compressed) == values
    assert door_requests(door_server) == before
    assert client.numbers("echo", [2.0], model_version="1") == [2.0]  # the door asks what it is
    wait_for(lambda: client.numbers("echo", [2.0], model_version="1") == [2.0] and door_requests(door_server) > before)


def test_a_request_that_does_not_fit_gets_the_error_of_the_kernel(client: Client) -> None:
    wrong = request("echo", [1.0])
    wrong.inputs[0].name = "WRONG"
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refused:
            client.infer(wrong, timeout=_TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "WRONG" in refused.value.details()


def test_a_stream_has_the_responses_in_the_order_of_its_requests(client: Client) -> None:
    requests = [request("echo" if number % 3 else "double", [float(number)], id=str(number)) for number in range(200)]
    responses = [each.infer_response for each in client.stream(requests)]
    assert [each.id for each in responses] == [str(number) for number in range(200)]
    assert [numbers_of(each) for each in responses] == [
        [float(number) * (1 if number % 3 else 2)] for number in range(200)
    ]


def test_decoupled_models_respond_over_streams(door_server: ServerProcess, client: Client) -> None:
    before = door_requests(door_server)
    found = [numbers_of(each.infer_response) for each in client.stream([request("several", [300.0])])]
    assert found == [[float(number)] for number in range(300)]
    assert door_requests(door_server) - before == 1


@pytest.mark.parametrize("count", [1, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_stream_goes_on_in_the_kernel_when_the_door_cannot_serve_it(client: Client, place: int, count: int) -> None:
    """From a request for an unknown model on. Each gets its response or error, in order."""
    requests = [request("echo", [float(number)] * count, id=str(number)) for number in range(10)]
    requests[place].model_name = "nobody"
    found = list(client.stream(requests))
    assert len(found) == 10
    assert "nobody" in found[place].error_message
    for number, each in enumerate(found):
        if number != place:
            assert (each.error_message, each.infer_response.id) == ("", str(number))
            assert numbers_of(each.infer_response) == [float(number)] * count


def test_a_stream_for_a_version_that_the_door_learns_is_served_by_it(door_server: ServerProcess) -> None:
    client = Client(door_server)
    before = door_requests(door_server)
    requests = [request("double", [float(number)], model_version="1") for number in range(20)]
    found = [numbers_of(each.infer_response) for each in client.stream(requests)]
    assert found == [[2.0 * number] for number in range(20)]
    assert door_requests(door_server) - before == 20
    client.channel.close()


def test_the_first_request_of_a_stream_can_be_the_kernels(client: Client) -> None:
    values = some_numbers(300_000)
    found = list(client.stream([request("echo", values)] * 3, compression=grpc.Compression.Gzip))
    assert [numbers_of(each.infer_response) for each in found] == [values] * 3


def test_a_stream_that_is_to_end_at_an_error_ends(client: Client) -> None:
    responses = client.stream([request("echo", [1.0])], metadata=(("triton_grpc_error", "true"),))
    assert numbers_of(next(responses).infer_response) == [1.0]
    assert list(responses) == []


def test_deadlines_hold_over_doors_and_over_passed_on_calls(client: Client, door_server: ServerProcess) -> None:
    client.numbers("sleepy", [0.0])
    for version in ("", "1", "1"):
        with pytest.raises(grpc.RpcError) as late:
            client.infer(request("sleepy", [1.0], model_version=version), timeout=0.1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: pending_requests(door_server, "sleepy") == 0)


def test_calls_that_are_cancelled_leave_no_request(client: Client, door_server: ServerProcess) -> None:
    client.numbers("sleepy", [0.0])
    before = door_requests(door_server)
    calls = [client.infer.future(request("sleepy", [0.3])) for _ in range(4)]
    stream = client.stream([request("sleepy", [0.3])] * 4)
    wait_for(lambda: door_requests(door_server) - before == 8)
    for call in (*calls, stream):
        call.cancel()
    wait_for(lambda: pending_requests(door_server, "sleepy") == 0)
    assert client.numbers("sleepy", [0.0]) == [0.0]


def test_doors_serve_grpc_on_the_event_loop_of_asyncio(door_models: Path) -> None:
    with serving(door_models, "--event-loop=asyncio") as server:
        client = Client(server)
        before = door_requests(server)
        assert client.numbers("echo", [1.0]) == [1.0]
        assert client.call(pb.ServerMetadataRequest()).name == "triton"
        assert [numbers_of(each.infer_response) for each in client.stream([request("echo", [2.0])])] == [[2.0]]
        assert door_requests(server) - before == 2
        client.channel.close()


def test_watching_health_is_a_stream_of_the_kernel(door_models: Path) -> None:
    with serving(door_models) as server:
        client = Client(server)
        watch = client.channel.unary_stream(
            "/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )(HealthCheckRequest(), timeout=_TIMEOUT_S)
        assert next(watch).status == HealthCheckResponse.SERVING
        assert server.stop() == 0
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        assert list(watch) == []
        client.channel.close()


def test_a_model_is_unloaded_and_loaded_over_doors(client: Client) -> None:
    for _ in range(2):
        assert client.numbers("double", [4.0]) == [8.0]
        client.call(pb.RepositoryModelUnloadRequest(model_name="double"))
        with pytest.raises(grpc.RpcError, match="double"):
            client.numbers("double", [4.0])
        client.call(pb.RepositoryModelLoadRequest(model_name="double"))
    assert client.numbers("double", [4.0]) == [8.0]


def test_a_model_is_loaded_with_files_of_many_bytes(client: Client) -> None:
    """The message is larger than the windows of the connection that passes it on."""
    large = pb.RepositoryModelLoadRequest(model_name="double")
    large.parameters["config"].string_param = '{"backend": "identity"}'
    large.parameters["file:1/model"].bytes_param = bytes(40 << 20)
    with contextlib.suppress(grpc.RpcError):  # what becomes of such a model does not matter
        client.call(large)
    client.call(pb.RepositoryModelLoadRequest(model_name="double"))
    assert client.numbers("double", [4.0]) == [8.0]


def test_channels_with_many_streams_are_spread_over_the_doors(door_server: ServerProcess) -> None:
    clients = [Client(door_server) for _ in range(2 * DOORS)]
    for each in clients:
        each.numbers("echo", [1.0])
    before = door_metric(door_server, "naiad_front_door_requests_total")
    streams = [each.stream([request("echo", [1.0])] * 5) for each in clients for _ in range(16)]
    for stream in streams:
        assert len(list(stream)) == 5
    after = door_metric(door_server, "naiad_front_door_requests_total")
    counts = [after[number] - before[number] for number in after]
    assert sum(counts) == 2 * DOORS * 16 * 5
    assert max(counts) <= 2 * sum(counts) / DOORS
    for each in clients:
        each.channel.close()


def test_nothing_is_left_of_connections_and_of_passed_on_calls(door_server: ServerProcess) -> None:
    processes = [psutil.Process(door_server.pid), *map(psutil.Process, door_processes(door_server).values())]

    def round_of_calls() -> None:
        for _ in range(10):
            client = Client(door_server)
            client.numbers("echo", some_numbers(50_000))
            client.call(pb.ServerMetadataRequest())
            list(client.stream([request("echo", [1.0]), request("nobody", [1.0]), request("echo", [1.0])]))
            client.channel.close()

    round_of_calls()
    wait_for(lambda: sum(door_metric(door_server, "naiad_front_door_connections").values()) == 0)
    before = [each.num_fds() for each in processes]
    round_of_calls()
    wait_for(lambda: [each.num_fds() for each in processes] <= [count + 2 for count in before])


def test_restricted_calls_need_their_header_wherever_they_are_served(door_models: Path) -> None:
    flags = ("--grpc-restricted-protocol=inference:one=1", "--grpc-restricted-protocol=metadata:two=2")
    with serving(door_models, *flags) as server:
        client = Client(server)
        for call, name, value in (
            (lambda **more: client.infer(request("echo", [1.0]), timeout=_TIMEOUT_S, **more), "one", "1"),
            (lambda **more: client.call(pb.ServerMetadataRequest(), **more), "two", "2"),
            (lambda **more: list(client.stream([request("echo", [1.0])], **more)), "one", "1"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"triton-grpc-protocol-{name}" in refused.value.details()
            assert call(metadata=((f"triton-grpc-protocol-{name}", value),))
        client.channel.close()


def test_access_lines_name_what_was_passed_on_once(door_models: Path) -> None:
    with serving(door_models, "--log-access=true") as server:
        client = Client(server)
        client.numbers("echo", [1.0], id="seen")
        client.call(pb.ServerMetadataRequest())
        server.wait_for_log("model=echo id=seen")
        server.wait_for_log("ServerMetadata")
        client.numbers("echo", [1.0], id="last")
        server.wait_for_log("id=last")
        assert len(re.findall("ServerMetadata", server.log)) == 1
        client.channel.close()


def test_requests_over_doors_are_traced_as_those_of_grpc(door_models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    trace = [f"--trace-config={each}" for each in (f"triton,file={file}", "level=TIMESTAMPS", "rate=1", "count=-1")]
    with serving(door_models, *trace) as server:
        client = Client(server)
        for number in range(3):
            client.numbers("echo", [1.0], id=f"traced {number}")
        assert door_requests(server) == 3
        client.channel.close()
    text = file.read_text()
    assert "traced 2" in text
    assert "HTTP_RECV_START" not in text


def test_killed_doors_take_only_their_own_channels(door_models: Path) -> None:
    """Under load of unary calls, streams and passed on calls a door is killed again and again."""
    with serving(door_models) as server:
        ended = threading.Event()
        wrong: list[object] = []
        lost = threading.Semaphore(0)

        def unary(client: Client) -> None:
            values = some_numbers(20_000)
            assert client.numbers("echo", values) == values
            assert client.numbers("echo", [7.0]) == [7.0]
            assert client.call(pb.ServerMetadataRequest()).name == "triton"

        def stream(client: Client) -> None:
            found = [numbers_of(each.infer_response) for each in client.stream([request("echo", [5.0])] * 20)]
            assert found == [[5.0]] * 20

        def load(work: Callable[[Client], None]) -> None:
            client = Client(server)
            while not ended.is_set():
                try:
                    work(client)
                except grpc.RpcError as error:
                    if error.code() not in _LOST:
                        wrong.append((error.code(), error.details()))
                    lost.release()
                    client.channel.close()
                    client = Client(server)
                except AssertionError as error:
                    wrong.append(error)
            client.channel.close()

        def is_served() -> bool:
            client = Client(server)
            try:
                return client.numbers("echo", [1.0]) == [1.0]
            except grpc.RpcError:  # the door got it just before its end
                return False
            finally:
                client.channel.close()

        threads = [threading.Thread(target=load, args=(work,)) for work in (unary, stream) * 4]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: all(door_metric(server, "naiad_front_door_connections").values()))
            for turn in range(4):
                number = turn % DOORS + 1
                wait_for(lambda number=number: number in door_processes(server))  # type: ignore[misc]
                wait_for(lambda number=number: door_metric(server, "naiad_front_door_ready")[number] == 1)  # type: ignore[misc]
                os.kill(door_processes(server)[number], signal.SIGKILL)
                wait_for(is_served)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert lost.acquire(timeout=60), "no channel was lost with its door"
        assert not wrong
        # Clients see the end of a door before the kernel has waited for its process.
        wait_for(lambda: "naiad_front_door_restarts_total 4" in server.get("/metrics", server.metrics_port)[1])
        wait_for(lambda: pending_requests(server, "echo") == 0)
        assert "Traceback" not in server.log


def test_a_stopped_server_drains_the_calls_of_its_doors(door_models: Path) -> None:
    """SIGTERM under load: what runs over a door, and what it has passed on, gets its response."""
    with serving(door_models) as server:
        client, found = Client(server), []
        client.numbers("sleepy", [0.0])
        before = door_requests(server)
        calls: list[Callable[[], list[float]]] = [
            lambda: client.numbers("sleepy", [0.5]),
            lambda: numbers_of(next(client.stream([request("sleepy", [0.5])])).infer_response),
        ]
        threads = [threading.Thread(target=lambda call=call: found.append(call())) for call in calls]
        for thread in threads:
            thread.start()
        wait_for(lambda: door_requests(server) - before == 2)
        doors = door_processes(server)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
        assert found == [[0.5], [0.5]]
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in doors.values()))
        client.channel.close()
