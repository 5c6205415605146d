"""tritonclient.http against a running server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.server import ServerProcess

httpclient = pytest.importorskip("tritonclient.http")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

pytestmark = pytest.mark.conformance

RAMP = np.arange(16, dtype=np.float32)
ONES = np.ones(16, np.float32)
EVERY_TYPE: dict[str, Any] = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-32768, 32767], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([0.5, -2.0], np.float16),
    "FP32": np.array([0.1, -1e30], np.float32),
    "FP64": np.array([0.1, 1e300]),
    "BYTES": np.array([b"one", b"", "søn".encode()], object),
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    made = httpclient.InferenceServerClient(server.url, concurrency=8)
    yield made
    made.close()


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> Any:
    made = httpclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def pair(*, binary: bool = True) -> list[Any]:
    return [tensor("INPUT0", RAMP, "FP32", binary=binary), tensor("INPUT1", ONES, "FP32", binary=binary)]


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("versions", "3")
    assert not client.is_model_ready("versions", "2")
    assert client.get_server_metadata()["name"] == "triton"
    metadata = client.get_model_metadata("batched")
    assert metadata["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1, -1]}]
    assert client.get_model_metadata("versions")["versions"] == ["1", "3"]
    config = client.get_model_config("add_sub")
    assert config["input"][0] == {
        **config["input"][0],
        "name": "INPUT0",
        "data_type": "TYPE_FP32",
        "dims": [16],
    }


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_inference_in_json_and_binary(client: Any, binary_in: bool, binary_out: bool) -> None:
    wanted = [httpclient.InferRequestedOutput(name, binary_data=binary_out) for name in ("OUTPUT0", "OUTPUT1")]
    result = client.infer("add_sub", pair(binary=binary_in), outputs=wanted, request_id="42")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP + ONES)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), RAMP - ONES)
    assert result.get_response()["id"] == "42"
    assert result.get_response()["model_version"] == "1"


@pytest.mark.parametrize(
    ("datatype", "binary"),
    # FP16 has no JSON form.
    [(datatype, binary) for datatype in EVERY_TYPE for binary in (True, False) if binary or datatype != "FP16"],
)
def test_every_datatype_comes_back_as_it_was_sent(client: Any, datatype: str, binary: bool) -> None:
    array = EVERY_TYPE[datatype]
    output = httpclient.InferRequestedOutput(f"OUT_{datatype}", binary_data=binary)
    result = client.infer("types", [tensor(f"IN_{datatype}", array, datatype, binary=binary)], outputs=[output])
    found = result.as_numpy(f"OUT_{datatype}")
    if datatype == "BYTES":
        assert [e.encode() if isinstance(e, str) else e for e in found.tolist()] == array.tolist()
    else:
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: Any, algorithm: str) -> None:
    result = client.infer(
        "add_sub", pair(), request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP + ONES)


def test_large_tensors(client: Any) -> None:
    value = np.random.default_rng(1).random((2, 1_000_000), np.float32)
    result = client.infer("batched", [tensor("IN", value, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUT"), value * 2)


def test_an_empty_tensor(client: Any) -> None:
    value = np.zeros((0,), np.float32)
    result = client.infer("types", [tensor("IN_FP32", value, "FP32")])
    assert result.as_numpy("OUT_FP32").shape == (0,)


def test_requests_of_several_clients_share_batches_and_get_their_own_rows(server: ServerProcess) -> None:
    def call(number: int) -> int:
        with httpclient.InferenceServerClient(server.url) as mine:
            largest = 0
            for step in range(20):
                value = np.full((1 + number % 3, 4), number * 100 + step, np.float32)
                result = mine.infer("batched", [tensor("IN", value, "FP32")])
                np.testing.assert_array_equal(result.as_numpy("OUT"), value * 2)
                largest = max(largest, int(result.as_numpy("REQUESTS").max()))
            return largest

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(call, range(8))) > 1, "no two requests were executed together"


def test_asynchronous_calls(client: Any) -> None:
    waiting = [client.async_infer("add_sub", pair()) for _ in range(20)]
    for handle in waiting:
        np.testing.assert_array_equal(handle.get_result().as_numpy("OUTPUT0"), RAMP + ONES)


def test_classification(client: Any) -> None:
    value = np.array([[0.1, 0.7, 0.2, 0.0]], np.float32)
    output = httpclient.InferRequestedOutput("SCORES", binary_data=True, class_count=2)
    result = client.infer("scores", [tensor("IN", value, "FP32")], outputs=[output])
    assert result.as_numpy("SCORES").tolist() == [[b"0.700000:1:dog", b"0.200000:2:bird"]]


def test_errors_have_status_and_text(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing' is not found"):
        client.infer("nothing", pair())
    with pytest.raises(InferenceServerException, match=r"expected 2 inputs but got 1 inputs for model 'add_sub'"):
        client.infer("add_sub", pair()[:1])
    with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
        client.infer("repeat", [tensor("IN", np.array([1], np.int32), "INT32")])


def test_statistics_count_requests(client: Any) -> None:
    def successes() -> int:
        statistics = client.get_inference_statistics("add_sub")["model_stats"][0]
        return int(statistics["inference_stats"]["success"]["count"])

    before = successes()
    client.infer("add_sub", pair())
    assert successes() == before + 1


def test_models_are_unloaded_and_loaded(client: Any) -> None:
    client.unload_model("scores")
    assert not client.is_model_ready("scores")
    with pytest.raises(InferenceServerException):
        client.infer("scores", [tensor("IN", np.zeros((1, 4), np.float32), "FP32")])
    client.load_model("scores")
    assert client.is_model_ready("scores")
    index = {(item["name"], item.get("version")): item["state"] for item in client.get_model_repository_index()}
    assert index["scores", "1"] == "READY"


def test_a_load_that_fails_leaves_the_serving_version_alone(client: Any) -> None:
    with pytest.raises(InferenceServerException):
        client.load_model("add_sub", config='{"backend": "python", "max_batch_size": -1}')
    client.infer("add_sub", pair())


def test_log_and_trace_settings(client: Any) -> None:
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.update_log_settings({"log_verbose_level": 0})["log_verbose_level"] == 0
    assert client.update_trace_settings("add_sub", {"trace_rate": "5"})["trace_rate"] == "5"
    assert client.update_trace_settings("add_sub", {"trace_rate": None})["trace_rate"] == "1000"
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
