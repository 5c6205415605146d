"""Servers within this program: workers, ports, threads, and starts that fail."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc

from backends.helper.pool import HelperPool
from backends.launch.worker_processes import WorkerProcesses
from kernel.app import Server
from kernel.embedding import BadOption, EmbeddedServer, NotRunning, ServingError, StartFailed
from kernel.options import ListenAddress, LogOptions, RepositoryOptions, ServerOptions
from kernel.records.tracer import Tracing
from tests.child_processes import children_with

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

MODELS = {
    "echo": """backend: "identity"
        input [{ name: "F" data_type: TYPE_FP32 dims: [-1] optional: true },
               { name: "S" data_type: TYPE_STRING dims: [-1] optional: true },
               { name: "B" data_type: TYPE_BF16 dims: [-1] optional: true }]
        output [{ name: "f" data_type: TYPE_FP32 dims: [-1] },
                { name: "s" data_type: TYPE_STRING dims: [-1] },
                { name: "b" data_type: TYPE_BF16 dims: [-1] }]""",
    "square_int32": """backend: "square"
        model_transaction_policy { decoupled: true }
        input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
        output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
        parameters { key: "CUSTOM_FAIL_COUNT" value { string_value: "1" } }""",
    "repeat_int32": """backend: "repeat"
        model_transaction_policy { decoupled: true }
        input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] },
               { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] },
               { name: "WAIT" data_type: TYPE_UINT32 dims: [1] }]
        output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] },
                { name: "IDX" data_type: TYPE_UINT32 dims: [1] }]""",
}


def write_models(folder: Path, *names: str) -> Path:
    for name in names or MODELS:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(MODELS[name])
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    models = write_models(tmp_path_factory.mktemp("models"))
    with EmbeddedServer(models, http_port=0, grpc_port=0, model_control_mode="explicit", load_model="*") as started:
        yield started


def workers() -> list[int]:
    """Return the process ids of workers of this process."""
    return children_with("backends.worker")


def square(server: EmbeddedServer, count: int) -> list[int]:
    """Return the values of the responses, the last of which is an error."""
    stream = server.stream("square_int32", {"IN": [count]})
    values = [int(next(stream)["OUT"][0]) for _ in range(count - 1)]
    with pytest.raises(ServingError, match="^simulated failure$"):
        next(stream)
    assert list(stream) == []
    return values


# ---- inference ------------------------------------------------------------------------------


def test_arrays_go_to_the_model_and_come_back(server: EmbeddedServer) -> None:
    floats = np.linspace(0, 1, 7, dtype=np.float32)
    outputs = server.infer("echo", {"F": floats, "S": ["ä", b"\xff"], "B": [1.0, -2.5]}, request_id="7")
    assert outputs["f"].tolist() == floats.tolist()
    assert outputs["s"].tolist() == ["ä".encode(), b"\xff"]
    assert outputs["b"].tolist() == [1.0, -2.5]
    assert (outputs.model_version, outputs.request_id) == ("1", "7")
    assert list(server.infer("echo", {"F": [1, 2]}, outputs=["f"], model_version=1)) == ["f"]


def test_large_arrays_are_the_callers_own(server: EmbeddedServer) -> None:
    given = np.arange(2**20, dtype=np.float32)
    first = server.infer("echo", {"F": given})["f"]
    first += 1
    second = server.infer("echo", {"F": given[::-2]})["f"]
    assert np.array_equal(first, given + 1)
    assert np.array_equal(second, given[::-2])


def test_errors_are_those_that_clients_read(server: EmbeddedServer) -> None:
    with pytest.raises(ServingError, match="^Request for unknown model: 'x' is not found$"):
        server.infer("x", {})
    with pytest.raises(ServingError, match="data-type is 'FP64', but model 'echo' expects 'FP32'"):
        server.infer("echo", {"F": np.zeros(1)})
    with pytest.raises(ServingError, match=r"\[request id: 5\] unexpected shape for input 'F' for model 'echo'"):
        server.infer("echo", {"F": np.zeros((1, 2), np.float32)}, request_id="5")
    with pytest.raises(ServingError, match="unexpected inference input 'X' for model 'echo'"):
        server.infer("echo", {"X": np.zeros(1, np.float32)})
    with pytest.raises(
        ServingError, match=r"infer\(\), unlike stream\(\), doesn't support models with decoupled transaction"
    ):
        server.infer("square_int32", {"IN": [1]})


def test_a_decoupled_model_streams(server: EmbeddedServer) -> None:
    inputs = {"IN": [7, 8, 9], "DELAY": [0, 1, 0], "WAIT": [0]}
    found = [(int(outputs["OUT"][0]), int(outputs["IDX"][0])) for outputs in server.stream("repeat_int32", inputs)]
    assert found == [(7, 0), (8, 1), (9, 2)]
    assert list(server.stream("repeat_int32", {"IN": [], "DELAY": [], "WAIT": [0]})) == []
    with pytest.raises(ServingError, match=r"^expected IN and DELAY shape to match, got \[2\] and \[1\]$"):
        next(server.stream("repeat_int32", {"IN": [1, 2], "DELAY": [0], "WAIT": [0]}))


def test_a_stream_is_longer_than_what_a_model_may_be_ahead(server: EmbeddedServer) -> None:
    assert square(server, 500) == [500] * 499


def test_one_instance_answers_several_requests_at_once(server: EmbeddedServer) -> None:
    with server.stream("repeat_int32", {"IN": [1, 2], "DELAY": [0, 600_000], "WAIT": [0]}) as slow:
        assert next(slow)["OUT"].tolist() == [1]
        assert len(list(server.stream("repeat_int32", {"IN": [3], "DELAY": [0], "WAIT": [0]}))) == 1


def test_who_waits_too_long_leaves_a_server_that_can_stop(tmp_path: Path) -> None:
    with EmbeddedServer(write_models(tmp_path, "repeat_int32")) as server:
        inputs = {"IN": [1], "DELAY": [600_000], "WAIT": [600_000]}
        with pytest.raises(TimeoutError, match="model 'repeat_int32' did not respond within 0.01 s"):
            next(server.stream("repeat_int32", inputs, client_timeout=0.01))
        # The instance is free again: its request was cancelled.
        assert len(list(server.stream("repeat_int32", {"IN": [3], "DELAY": [0], "WAIT": [0]}))) == 1


def test_threads_share_a_server(server: EmbeddedServer) -> None:
    def ask(number: int) -> bool:
        outputs = server.infer("echo", {"F": [number] * 100})
        return outputs["f"].tolist() == [number] * 100 and square(server, 3) == [3, 3]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))


# ---- models and doors -----------------------------------------------------------------------


def test_models_are_described(server: EmbeddedServer) -> None:
    index = {item.name: (item.version, item.state) for item in server.models()}
    assert index["echo"] == ("1", "READY")
    assert server.ready()
    assert server.model_ready("echo", 1)
    metadata = server.metadata("echo")
    assert [(each.name, each.datatype, each.shape) for each in metadata.inputs[:1]] == [("F", "FP32", (-1,))]
    assert metadata == server.metadata("echo", 1)
    assert server.config("echo")["backend"] == "identity"
    with pytest.raises(ServingError, match="'nobody' is not found"):
        server.config("nobody")


def test_models_are_unloaded_and_loaded(server: EmbeddedServer) -> None:
    server.unload("echo")
    with pytest.raises(ServingError, match="'echo' has no available versions"):
        server.infer("echo", {"F": [1]})
    server.load("echo")
    assert server.infer("echo", {"F": [1]})["f"].tolist() == [1]
    assert "echo" in {item.name for item in server.models(ready=True)}
    config = {**server.config("echo"), "max_batch_size": 3}
    server.load("echo", config=config)
    assert server.config("echo")["max_batch_size"] == 3
    server.load("echo", config=config, files={"1/nothing": b""})
    assert server.infer("echo", {"F": [[1], [2]]})["f"].tolist() == [[1], [2]]
    server.load("echo")
    with pytest.raises(ServingError, match="failed to load 'nobody', failed to poll from model repository"):
        server.load("nobody")


def test_other_programs_are_served_beside(server: EmbeddedServer) -> None:
    with urllib.request.urlopen(f"{server.http_url}/v2/models/echo") as reply:
        assert reply.status == 200
    assert set(server.ports) == {"http", "grpc"}
    with pytest.raises(KeyError):
        _ = server.metrics_url


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        ("square_int32", {"IN": ("INT32", [4])}, [{"OUT": [4]}] * 3 + ["simulated failure"]),
        (
            "repeat_int32",
            {"IN": ("INT32", [5, 6]), "DELAY": ("UINT32", [1, 0]), "WAIT": ("UINT32", [0])},
            [{"OUT": [5], "IDX": [0]}, {"OUT": [6], "IDX": [1]}],
        ),
    ],
)
def test_triton_clients_stream_from_the_example_backends(
    server: EmbeddedServer, model: str, inputs: dict[str, tuple[str, list[int]]], expected: list[object]
) -> None:
    answers: list[object] = []
    ended = threading.Event()

    def take(result: tritonclient.grpc.InferResult | None, error: Exception | None) -> None:
        if result is None:
            answers.append(str(error))
            return
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            ended.set()
        else:
            answers.append({output.name: result.as_numpy(output.name).tolist() for output in response.outputs})

    tensors = []
    for name, (datatype, values) in inputs.items():
        tensors.append(tritonclient.grpc.InferInput(name, [len(values)], datatype))
        tensors[-1].set_data_from_numpy(np.array(values, datatype.lower()))
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(take)
        client.async_stream_infer(model, tensors, enable_empty_final_response=True)
        assert ended.wait(60)
        client.stop_stream()
    assert answers == expected


# ---- starting -------------------------------------------------------------------------------


def test_several_servers_run_in_one_process(server: EmbeddedServer, tmp_path: Path) -> None:
    before = set(workers())
    with EmbeddedServer(write_models(tmp_path, "square_int32"), http_port=0, metrics_port=0) as other:
        assert other.http_url != server.http_url
        assert {item.name for item in other.models()} == {"square_int32"}
        assert square(other, 2) == [2]
        with urllib.request.urlopen(other.metrics_url) as reply:
            page = reply.read().decode()
        assert re.search(r'nv_inference_request_success\{model="square_int32",version="1"\} [01]', page)
        assert other.start() is other  # it runs
        assert len(set(workers()) - before) == 1
    assert set(workers()) <= before
    assert server.infer("echo", {"F": [1]})["f"].tolist() == [1]


def test_a_server_is_stopped_and_started_again(tmp_path: Path) -> None:
    server = EmbeddedServer(write_models(tmp_path, "square_int32"))
    with pytest.raises(NotRunning, match="^the server is not running$"):
        server.infer("square_int32", {"IN": [1]})
    for _ in range(2):
        server.start()
        assert square(server, 2) == [2]
        stream = server.stream("square_int32", {"IN": [3]})
        server.stop()
        server.stop()
        with pytest.raises(NotRunning):
            server.models()
        assert next(stream)["OUT"].tolist() == [3]  # it was accepted, and so answered


def test_options_can_be_given_as_they_are(tmp_path: Path) -> None:
    closed = ListenAddress(False, "127.0.0.1", 0)
    options = ServerOptions(
        RepositoryOptions(paths=(write_models(tmp_path, "square_int32"),)),
        http_listener=ListenAddress(True, "::1", 0),
        grpc_listener=closed,
        metrics_listener=closed,
        event_loop="asyncio",
    )
    with EmbeddedServer(options=options) as server:
        assert square(server, 2) == [2]
        assert server.http_url.startswith("http://[::1]:")


def test_options_that_cannot_be_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=f"model repository '{tmp_path}/no' is not a folder"):
        EmbeddedServer(tmp_path / "no")
    with pytest.raises(BadOption, match="there is no flag --htp-port"):
        EmbeddedServer(tmp_path, htp_port=0)
    with pytest.raises(BadOption, match="logs by Python's logging"):
        EmbeddedServer(tmp_path, log_verbose=1)
    repository = RepositoryOptions(paths=(tmp_path,))
    with pytest.raises(BadOption, match="give either options or flags"):
        EmbeddedServer(tmp_path, options=ServerOptions(repository))
    with pytest.raises(BadOption, match="logs by Python's logging"):
        EmbeddedServer(options=ServerOptions(repository, log=LogOptions(format="json")))


def test_a_model_that_fails_is_the_reason_why_the_server_does_not_start(tmp_path: Path) -> None:
    before = set(workers())
    write_models(tmp_path, "square_int32", "echo")
    (tmp_path / "echo" / "config.pbtxt").write_text('backend: "repeat" max_batch_size: 1')
    with pytest.raises(StartFailed) as caught:
        EmbeddedServer(tmp_path).start()
    assert str(caught.value) == (
        "creating server: Internal - failed to load all models: echo ('echo': Invalid argument: repeat backend only "
        "supports models with max_batch_size == 0; exit_on_error=False starts without them)"
    )
    assert set(workers()) <= before
    with EmbeddedServer(tmp_path, exit_on_error=False) as server:
        assert not server.ready()
        assert square(server, 2) == [2]


def test_a_start_that_fails_for_a_reason_that_nobody_has_thought_of_raises_what_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Server) -> None:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(Server, "_build", broken)
    with pytest.raises(StartFailed, match="the server has failed: ZeroDivisionError: no luck") as caught:
        EmbeddedServer(tmp_path).start()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_inputs_without_names_are_refused_in_words(tmp_path: Path) -> None:
    write_models(tmp_path, "square_int32")
    with EmbeddedServer(tmp_path) as server:
        inputs: Any = [1]
        with pytest.raises(TypeError, match="inputs must be a mapping of names to arrays, got list"):
            server.infer("square_int32", inputs)
        with pytest.raises(KeyError, match="the http port is closed: give EmbeddedServer http_port=0"):
            _ = server.http_url


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"Socket '127.0.0.1:{port}' already in use"):
            EmbeddedServer(tmp_path, http_port=port).start()


def test_a_start_that_fails_closes_the_parts_that_were_made_the_last_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for kind in (WorkerProcesses, HelperPool, Tracing):

        async def close(self: WorkerProcesses, name: str = kind.__name__, end: Any = kind.close) -> None:
            closed.append(name)
            await end(self)

        monkeypatch.setattr(kind, "close", close)
    (tmp_path / "file").touch()
    with pytest.raises(StartFailed, match="cannot be written"):
        EmbeddedServer(write_models(tmp_path / "models", "echo"), record=str(tmp_path / "file")).start()
    # The tracing has helpers of its own.
    assert closed == ["HelperPool", "Tracing", *["HelperPool"] * 3, "WorkerProcesses"]
