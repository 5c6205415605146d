"""tritonclient.grpc against a running server: unary calls, streams, administration."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

grpcclient = pytest.importorskip("tritonclient.grpc")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

pytestmark = pytest.mark.conformance

RAMP = np.arange(16, dtype=np.float32)
ONES = np.ones(16, np.float32)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    made = grpcclient.InferenceServerClient(server.grpc_url)
    yield made
    made.close()


def tensor(name: str, array: Any, datatype: str) -> Any:
    made = grpcclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def pair() -> list[Any]:
    return [tensor("INPUT0", RAMP, "FP32"), tensor("INPUT1", ONES, "FP32")]


class Stream:
    """One ModelStreamInfer call and what came back on it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __enter__(self) -> Stream:
        self._client.start_stream(callback=lambda result, error: self.answers.put((result, error)))
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()

    def send(self, model: str, inputs: list[Any], **more: Any) -> None:
        self._client.async_stream_infer(model, inputs, **more)

    def next(self) -> tuple[Any, Any]:
        return self.answers.get(timeout=60)


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[Stream]:
    with grpcclient.InferenceServerClient(server.grpc_url) as mine, Stream(mine) as opened:
        yield opened


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    metadata = client.get_model_metadata("batched", as_json=True)
    assert metadata["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": ["-1", "-1"]}]
    assert client.get_server_metadata().name == "triton"
    assert client.get_model_config("batched").config.max_batch_size == 8


def test_inference(client: Any) -> None:
    result = client.infer("add_sub", pair(), request_id="7", outputs=[grpcclient.InferRequestedOutput("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), RAMP - ONES)
    assert result.as_numpy("OUTPUT0") is None
    assert result.get_response().id == "7"


def test_large_tensors(client: Any) -> None:
    value = np.random.default_rng(3).random((1, 4_000_000), np.float32)
    result = client.infer("batched", [tensor("IN", value, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUT"), value * 2)


def test_asynchronous_calls(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(50):
        client.async_infer("add_sub", pair(), callback=lambda result, error: answers.put((result, error)))
    for _ in range(50):
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP + ONES)


def test_errors_have_code_and_text(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="'nothing' is not found") as caught:
        client.infer("nothing", pair())
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="decoupled transaction policy") as caught:
        client.infer("repeat", [tensor("IN", np.array([1], np.int32), "INT32")])
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_stream_of_plain_requests_is_answered_in_order(stream: Stream) -> None:
    for number in range(20):
        stream.send("batched", [tensor("IN", np.full((1, 4), number, np.float32), "FP32")], request_id=str(number))
    for number in range(20):
        result, error = stream.next()
        assert error is None
        assert result.get_response().id == str(number)
        np.testing.assert_array_equal(result.as_numpy("OUT"), np.full((1, 4), number * 2, np.float32))


def test_a_decoupled_model_streams_its_responses(stream: Stream) -> None:
    count = 200  # more than a model may send ahead of its client
    stream.send("repeat", [tensor("IN", np.arange(count, dtype=np.int32), "INT32")], enable_empty_final_response=True)
    for number in range(count):
        result, error = stream.next()
        assert error is None
        assert result.as_numpy("OUT").tolist() == [number]
        assert not result.get_response().parameters["triton_final_response"].bool_param
    result, error = stream.next()
    assert error is None
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert not result.get_response().outputs


def test_an_error_does_not_end_the_stream(stream: Stream) -> None:
    stream.send("nothing", pair(), request_id="bad")
    _, error = stream.next()
    assert "is not found" in str(error)
    stream.send("add_sub", pair(), request_id="good")
    result, error = stream.next()
    assert error is None
    assert result.get_response().id == "good"


def test_a_model_learns_that_its_client_has_gone(server: ServerProcess) -> None:
    before = server.log.count("client is gone")
    with grpcclient.InferenceServerClient(server.grpc_url) as mine:
        stream = Stream(mine)
        stream.__enter__()
        stream.send("patient", [tensor("IN", np.array([1], np.int32), "INT32")])
        assert stream.next()[1] is None
        mine.stop_stream(cancel_requests=True)
    wait_for(lambda: server.log.count("client is gone") > before)


def test_administration(client: Any) -> None:
    client.unload_model("versions")
    assert not client.is_model_ready("versions")
    client.load_model("versions")
    assert client.is_model_ready("versions", "3")
    names = {model.name for model in client.get_model_repository_index().models}
    assert {"add_sub", "repeat", "versions"} <= names
    client.infer("add_sub", pair())
    statistics = client.get_inference_statistics("add_sub").model_stats[0]
    assert statistics.inference_count >= statistics.execution_count > 0
    assert client.update_trace_settings(settings={"trace_rate": "9"}).settings["trace_rate"].value[0] == "9"
    client.update_trace_settings(settings={"trace_rate": None})
    assert client.update_log_settings({"log_verbose_level": 1}).settings["log_verbose_level"].uint32_param == 1
    client.update_log_settings({"log_verbose_level": 0})


def test_the_standard_health_service(server: ServerProcess) -> None:
    import grpc

    with grpc.insecure_channel(server.grpc_url) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=60) == b"\x08\x01"
