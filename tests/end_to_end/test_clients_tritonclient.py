"""A tour of every public method of tritonclient's four clients; `make clients` makes it with an old one, too.

The synchronous and the asynchronous clients have the same methods, so one tour serves all: `done` awaits where there
is something to await.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import shutil
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytest.importorskip("tritonclient.http.aio")
pytest.importorskip("tritonclient.grpc.aio")

import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
import tritonclient.grpc.auth as grpc_auth
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
import tritonclient.http.auth as http_auth
from tritonclient.utils import InferenceServerException

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the old one imports pkg_resources, which warns
    import tritonclient.utils.shared_memory as shm

pytestmark = pytest.mark.conformance

MODELS = Path(__file__).parents[1] / "conformance" / "models"
SERVED = ("sum", "told", "tokens", "types", "versions")
RAMP = np.arange(4, dtype=np.float32)
CLIENTS = {"http": httpclient, "http.aio": http_aio, "grpc": grpcclient, "grpc.aio": grpc_aio}
#: Answers when its client has gone.
SLOW = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            print("slow: begun", flush=True)
            deadline = time.monotonic() + 20
            while not request.is_cancelled() and time.monotonic() < deadline:
                time.sleep(0.005)
            print("slow: cancelled" if request.is_cancelled() else "slow: forgotten", flush=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.int32))]) for _ in requests]
"""
SLOW_CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name in SERVED:
        shutil.copytree(MODELS / name, repository / name)
    (repository / "slow/1").mkdir(parents=True)
    (repository / "slow/1/model.py").write_text(SLOW)
    (repository / "slow/config.pbtxt").write_text(SLOW_CONFIG)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--http-header-forward-pattern=(authorization|x-tour)",
             "--grpc-header-forward-pattern=(authorization|x-tour)")  # fmt: skip
    with ServerProcess(repository, *flags) as running:
        yield running


async def done(value: Any) -> Any:
    """Return the result of a call of either kind of client."""
    return await value if inspect.isawaitable(value) else value


class Tour:
    """A client that keeps account of the methods that were called."""

    def __init__(self, kind: str, server: ServerProcess) -> None:
        self.kind = kind
        self.grpc = kind.startswith("grpc")
        self.module = CLIENTS[kind]
        #: http.aio of 2.41 fails by itself on files and on compression: it lacks imports.
        self.forgetful = kind == "http.aio" and not hasattr(http_aio, "base64")
        self.tensors = grpcclient if self.grpc else httpclient
        self.client = self.module.InferenceServerClient(server.grpc_url if self.grpc else server.url)
        self.server = server
        self.called: set[str] = set()
        #: Answers as dictionaries, from gRPC too.
        self.shape: dict[str, Any] = {"as_json": True} if self.grpc else {}

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.client, name)

    def missing(self) -> set[str]:
        """Return the public methods that nobody has called."""
        return {name for name in dir(type(self.client)) if not name.startswith("_")} - self.called

    def tensor(self, name: str, value: Any, datatype: str) -> Any:
        made = self.tensors.InferInput(name, list(value.shape), datatype)
        made.set_data_from_numpy(value)
        return made

    def pair(self) -> list[Any]:
        return [self.tensor("A", RAMP, "FP32"), self.tensor("B", RAMP, "FP32")]

    async def told(self, **more: Any) -> dict[str, Any]:
        """Return what a model was told about a request."""
        outputs = [self.tensors.InferRequestedOutput("TOLD")]
        given = [self.tensor("IN", RAMP, "FP32")]
        result = await done(self.infer("told", given, outputs=outputs, **more))
        found: dict[str, Any] = json.loads(result.as_numpy("TOLD")[0])
        return found


async def health_and_metadata(tour: Tour) -> None:
    assert await done(tour.is_server_live())
    assert await done(tour.is_server_ready(headers={"x-any": "thing"}))
    assert await done(tour.is_model_ready("versions", "3"))
    assert not await done(tour.is_model_ready("versions", "2"))
    assert (await done(tour.get_server_metadata(**tour.shape)))["name"] == "triton"
    assert (await done(tour.get_model_metadata("versions", **tour.shape)))["versions"] == ["1", "3"]
    config = await done(tour.get_model_config("sum", **tour.shape))
    assert config.get("config", config)["name"] == "sum"
    index = await done(tour.get_model_repository_index(**tour.shape))
    listed = index["models"] if tour.grpc else index
    assert {model["name"] for model in listed} == {*SERVED, "slow"}


async def repository(tour: Tour) -> None:
    await done(tour.unload_model("sum"))
    assert not await done(tour.is_model_ready("sum"))
    with pytest.raises(InferenceServerException, match="'sum'"):
        await done(tour.infer("sum", tour.pair()))
    config = {"backend": "python", "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],
              "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [-1]}]}  # fmt: skip
    source = (MODELS / "versions/1/model.py").read_bytes()
    if not tour.forgetful:
        await done(tour.load_model("sum", config=json.dumps(config), files={"file:7/model.py": source}))
        given = tour.tensor("IN", np.array([1, 2], np.int32), "INT32")
        result = await done(tour.infer("sum", [given], model_version="7"))
        assert result.as_numpy("OUT").tolist() == [7, 14]
    await done(tour.load_model("sum"))
    assert await done(tour.is_model_ready("sum", "1"))
    with pytest.raises(InferenceServerException, match="failed to load 'nothing'"):
        await done(tour.load_model("nothing"))


async def settings(tour: Tour) -> None:
    def rate(answer: Any) -> Any:
        return answer["settings"]["trace_rate"]["value"][0] if tour.grpc else answer["trace_rate"]

    def level(answer: Any) -> Any:
        return answer["settings"]["log_verbose_level"]["uint32_param"] if tour.grpc else answer["log_verbose_level"]

    update = tour.update_trace_settings
    assert rate(await done(update("sum", {"trace_rate": "5"}, **tour.shape))) == "5"
    assert rate(await done(tour.get_trace_settings("sum", **tour.shape))) == "5"
    assert rate(await done(update("sum", {"trace_rate": None}, **tour.shape))) == "1000"
    assert level(await done(tour.update_log_settings({"log_verbose_level": 1}, **tour.shape))) == 1
    assert level(await done(tour.get_log_settings(**tour.shape))) == 1
    await done(tour.update_log_settings({"log_verbose_level": 0}))


async def shared_memory(tour: Tour) -> None:
    name = f"naiad_tour_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 64)
    try:
        shm.set_shared_memory_region(handle, [RAMP, RAMP])
        await done(tour.register_system_shared_memory(name, f"/{name}", 64))
        assert name in str(await done(tour.get_system_shared_memory_status(**tour.shape)))
        given = [tour.tensors.InferInput(each, [4], "FP32") for each in ("A", "B")]
        for number, tensor in enumerate(given):
            tensor.set_shared_memory(name, 16, offset=16 * number)
        wanted = tour.tensors.InferRequestedOutput("SUM")
        wanted.set_shared_memory(name, 16, offset=32)
        await done(tour.infer("sum", given, outputs=[wanted]))
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [4], offset=32), RAMP * 2)
        await done(tour.unregister_system_shared_memory(name))
        assert name not in str(await done(tour.get_system_shared_memory_status(**tour.shape)))
    finally:
        shm.destroy_shared_memory_region(handle)
    with pytest.raises(InferenceServerException):
        await done(tour.register_cuda_shared_memory("device", b"AAAA", 0, 64))
    assert "device" not in str(await done(tour.get_cuda_shared_memory_status(**tour.shape)))
    await done(tour.unregister_cuda_shared_memory("device"))


async def inference(tour: Tour) -> None:
    result = await done(tour.infer("sum", tour.pair(), request_id="42"))
    np.testing.assert_array_equal(result.as_numpy("SUM"), RAMP * 2)
    assert result.as_numpy("NOTHING") is None
    response = result.get_response()
    assert (response.id if tour.grpc else response["id"]) == "42"
    assert result.get_output("SUM") is not None
    found = await tour.told(
        request_id="7", priority=3, timeout=5_000_000, parameters={"tenant": "blue", "level": 3, "dry": True}
    )
    assert found["parameters"] == {"tenant": "blue", "level": 3, "dry": True}
    assert found["timeout"] == 5_000_000
    texts = tour.tensor("IN_BYTES", np.array([b"one", "søn".encode()], object), "BYTES")
    result = await done(tour.infer("types", [texts], outputs=[tour.tensors.InferRequestedOutput("OUT_BYTES")]))
    assert result.as_numpy("OUT_BYTES").tolist() == [b"one", "søn".encode()]
    statistics = await done(tour.get_inference_statistics("sum", **tour.shape))
    assert int(statistics["model_stats"][0]["inference_stats"]["success"]["count"]) > 0
    both = ("request_compression_algorithm", "response_compression_algorithm")
    keys = ("compression_algorithm",) if tour.grpc else both
    for algorithm in () if tour.forgetful else ("gzip", "deflate"):
        result = await done(tour.infer("sum", tour.pair(), **dict.fromkeys(keys, algorithm)))
        np.testing.assert_array_equal(result.as_numpy("SUM"), RAMP * 2)


async def plugins(tour: Tour) -> None:
    assert tour.plugin() is None
    tour.register_plugin((grpc_auth if tour.grpc else http_auth).BasicAuth("ada", "lovelace"))
    assert tour.plugin() is not None
    found = await tour.told(headers={"x-tour": "yes"})
    forwarded = {name.lower(): value for name, value in found["parameters"].items()}
    assert forwarded == {"authorization": "Basic YWRhOmxvdmVsYWNl", "x-tour": "yes"}
    tour.unregister_plugin()
    assert tour.plugin() is None


async def bodies(tour: Tour) -> None:
    """What the HTTP clients offer to those who send requests by other means; and JSON both ways."""
    given = [httpclient.InferInput(name, [4], "FP32") for name in ("A", "B")]
    for tensor in given:
        tensor.set_data_from_numpy(RAMP, binary_data=False)
    body, length = tour.generate_request_body(given, request_id="9")
    assert length is None
    assert json.loads(body)["inputs"][0]["data"] == RAMP.tolist()
    wanted = [httpclient.InferRequestedOutput("SUM", binary_data=False)]
    result = await done(tour.infer("sum", given, outputs=wanted))
    assert result.get_output("SUM")["data"] == (RAMP * 2).tolist()
    answer = b'{"model_name":"sum","outputs":[{"name":"SUM","datatype":"FP32","shape":[1],"data":[1.5]}]}'
    assert tour.parse_response_body(answer).as_numpy("SUM").tolist() == [1.5]


def tokens(tour: Tour, count: int) -> list[Any]:
    return [tour.tensor("PROMPT", np.array([b"t"], object), "BYTES"),
            tour.tensor("COUNT", np.array([count], np.int32), "INT32")]  # fmt: skip


def slow(tour: Tour) -> list[Any]:
    return [tour.tensor("IN", np.zeros(1, np.int32), "INT32")]


def cancels(tour: Tour, cancel: Callable[[], object]) -> None:
    """Assert that the model of a request in flight learns of its end."""
    log = tour.server.log
    wait_for(lambda: tour.server.log.count("slow: begun") > log.count("slow: cancelled"))
    cancel()
    wait_for(lambda: tour.server.log.count("slow: cancelled") > log.count("slow: cancelled"))


def http_calls(tour: Tour) -> None:
    waiting = [tour.async_infer("sum", tour.pair()) for _ in range(5)]
    for each in waiting:
        np.testing.assert_array_equal(each.get_result(block=True, timeout=60).as_numpy("SUM"), RAMP * 2)


def grpc_calls(tour: Tour) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def note(result: Any, error: Any) -> None:
        answers.put((result, error))

    for _ in range(5):
        tour.async_infer("sum", tour.pair(), callback=note)
    for _ in range(5):
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("SUM"), RAMP * 2)
    call = tour.async_infer("slow", slow(tour), callback=note)
    cancels(tour, call.cancel)
    assert "ancel" in str(answers.get(timeout=60)[1])
    tour.start_stream(callback=note, headers={"x-tour": "yes"})
    tour.async_stream_infer("tokens", tokens(tour, 3), enable_empty_final_response=True, request_id="s")
    found = [answers.get(timeout=60)[0].get_response() for _ in range(4)]
    assert [each.parameters["triton_final_response"].bool_param for each in found] == [False, False, False, True]
    assert {each.id for each in found} == {"s"}
    tour.stop_stream()


async def http_aio_calls(tour: Tour) -> None:
    results = await asyncio.gather(*(tour.infer("sum", tour.pair()) for _ in range(5)))
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("SUM"), RAMP * 2)
    begun, cancelled = (tour.server.log.count(f"slow: {word}") for word in ("begun", "cancelled"))
    call = asyncio.ensure_future(tour.infer("slow", slow(tour)))
    await asyncio.to_thread(wait_for, lambda: tour.server.log.count("slow: begun") > begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(wait_for, lambda: tour.server.log.count("slow: cancelled") > cancelled)


async def grpc_aio_calls(tour: Tour) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(2):
            yield {"model_name": "tokens", "inputs": tokens(tour, 2), "request_id": str(number)}

    found = []
    async for result, error in tour.stream_infer(requests()):
        assert error is None
        found.append((result.get_response().id, int(result.as_numpy("INDEX")[0])))
    assert sorted(found) == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]

    async def unending() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "slow", "inputs": slow(tour)}

    begun, cancelled = (tour.server.log.count(f"slow: {word}") for word in ("begun", "cancelled"))
    answers = tour.stream_infer(unending())
    first = asyncio.ensure_future(anext(answers))
    await asyncio.to_thread(wait_for, lambda: tour.server.log.count("slow: begun") > begun)
    answers.cancel()
    with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
        await first
    await asyncio.to_thread(wait_for, lambda: tour.server.log.count("slow: cancelled") > cancelled)


@pytest.mark.slow_loop("synchronous clients are visited by a coroutine, too, which blocks only the test")
@pytest.mark.parametrize("kind", CLIENTS)
def test_every_method_of_a_client(server: ServerProcess, kind: str) -> None:
    async def visit() -> None:
        tour = Tour(kind, server)
        await health_and_metadata(tour)
        await repository(tour)
        await settings(tour)
        await shared_memory(tour)
        await inference(tour)
        await plugins(tour)
        if not tour.grpc:
            await bodies(tour)
        own = {"http": http_calls, "http.aio": http_aio_calls, "grpc": grpc_calls, "grpc.aio": grpc_aio_calls}[kind]
        await done(own(tour))
        await done(tour.close())
        assert tour.missing() == set()

    asyncio.run(visit())
