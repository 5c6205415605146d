"""Ensembles with real workers: where tensors are, what happens when something ends, and what clients get.

One file, because its tests share the models and configurations that it begins with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import ServerProcess, wait_for
from kernel.serving.request import Request
from shm.tensor import Tensor
from tests.end_to_end.server_threads import FutureSink, server_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernel.embedding.server import ServerThread
    from tests.end_to_end.conftest import WriteModel

MIB16 = 16 << 20

TENSORS = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

TWO_INPUTS = """
input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }, { name: "Y" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

#: Adds one to its input, in place, and gives a copy of it back.
PLUS_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            value += 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value.copy())]))
        return responses
"""

#: Gives its input back, as it is.
SAME = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""

#: Waits for a file `go` beside the model, and says with a file `waits` that it waits.
WAITS = """
import os, time
FOLDER = pb_utils.get_model_dir()

class TritonPythonModel:
    def execute(self, requests):
        open(os.path.join(FOLDER, "waits"), "w").close()
        while not os.path.exists(os.path.join(FOLDER, "go")):
            time.sleep(0.005)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() + 1)]
            )
            for r in requests
        ]
"""

#: Sends its input 300 times with numbers, and says with a file how many it could send.
STREAM = """
import os
FOLDER = pb_utils.get_model_dir()

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(300):
                if sender.is_cancelled():
                    open(os.path.join(FOLDER, "cancelled"), "w").close()
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))]))
                with open(os.path.join(FOLDER, "sent"), "w") as file:
                    file.write(str(number + 1))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

JOIN = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("X", "Y"))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", a * 1000 + b)]))
        return responses
"""

WORDS = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.char.upper(pb_utils.get_input_tensor_by_name(r, "IN").as_numpy().astype(str))
                                .astype(object))]
            )
            for r in requests
        ]
"""


def ensemble(repository: Path, name: str, *steps: tuple[str, str, str], outputs: str = "Z", more: str = "") -> None:
    """Write an ensemble with the input A. A step is its model, its inputs and its outputs, such as `IN=A`."""
    (repository / name / "1").mkdir(parents=True)
    text = 'platform: "ensemble"\n' + (more or 'input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }]\n')
    for output in outputs.split() if "output" not in more else ():
        text += f'output [{{ name: "{output}" data_type: TYPE_FP32 dims: [-1] }}]\n'
    text += "ensemble_scheduling {\n"
    for model, inputs, made in steps:
        text += f'step {{ model_name: "{model}" model_version: -1\n'
        for field, pairs in (("input_map", inputs), ("output_map", made)):
            for pair in pairs.split():
                key, _, value = pair.partition("=")
                text += f'{field} {{ key: "{key}" value: "{value}" }}\n'
        text += "}\n"
    (repository / name / "config.pbtxt").write_text(text + "}\n")


CHAIN = (("plus", "IN=A", "OUT=b"), ("plus", "IN=b", "OUT=c"), ("plus", "IN=c", "OUT=Z"))


@pytest.fixture
def repository(write_model: WriteModel) -> Path:
    return write_model("plus", TENSORS, PLUS_ONE)


def infer(server: ServerProcess, model: str, values: list[float], timeout: float = 60, **more: Any) -> dict[str, Any]:
    """Return the response, or the error with its status."""
    body = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [len(values)], "data": values}], **more}
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            found: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": json.loads(error.read())["error"]}
    return found


def outputs(response: dict[str, Any]) -> dict[str, list[float]]:
    return {output["name"]: output["data"] for output in response["outputs"]}


def post(server: ServerProcess, path: str) -> None:
    request = urllib.request.Request(f"http://{server.url}{path}", b"{}")
    urllib.request.urlopen(request, timeout=60).close()


# ---- memory ---------------------------------------------------------------------------------


@pytest.fixture
def embedded(repository: Path) -> Iterator[ServerThread]:
    ensemble(repository, "chain", *CHAIN)
    with server_thread(repository, model_control_mode="explicit", load_model="*") as thread:
        yield thread


@pytest.mark.slow_loop("16 MiB are copied and compared on the loop, by the test")
def test_a_chain_of_three_models_copies_no_byte_in_the_kernel(embedded: ServerThread, reads: list[int]) -> None:
    """16 MiB between each two models: the kernel touches them once, when it takes them from the client."""
    given = np.arange(MIB16 // 4, dtype=np.float32)

    async def run() -> None:
        kernel = embedded.kernel
        async with asyncio.timeout(60):
            for _ in range(2):
                reads.clear()
                sink = FutureSink()
                kernel.submit(Request("chain", [Tensor("A", "FP32", [len(given)], given.tobytes())], sink))
                response = await sink.response
                assert response.error is None, response.error
                assert reads == [MIB16], "the client's bytes go to the arena, once"
                assert response.outputs is not None
                (output,) = response.outputs
                assert np.array_equal(np.frombuffer(output.raw(), np.float32), given + 3)
                assert output.span is not None
                arena = output.span.lease.region
                response.release()
                assert arena.lease_count == 0, "nothing between the models is held any longer"
        counted_by = kernel.resolve("plus").statistics
        assert counted_by.execution_count == 6
        # The model returns an array of its own, which its worker copies to the arena; inputs are read where they are.
        assert (counted_by.copied_tensors, counted_by.copied_byte_size) == (6, 6 * MIB16)
        kernel.check()

    embedded.run(run)


def test_a_step_that_only_reads_a_large_tensor_passes_it_on_where_it_is(
    repository: Path, write_model: WriteModel
) -> None:
    """Every request has other values at the same place, and the steps around change theirs."""
    write_model("same", TENSORS, SAME)
    steps = (("plus", "IN=A", "OUT=b"), ("same", "IN=b", "OUT=c"), ("same", "IN=c", "OUT=d"), ("plus", "IN=d", "OUT=Z"))
    ensemble(repository, "around", *steps)
    with ServerProcess(repository) as server:
        for number in range(4):
            assert outputs(infer(server, "around", [float(number)] * 20_000)) == {"Z": [number + 2.0] * 20_000}
        assert copied_tensors(server) == {"plus": 8, "same": 0}


def copied_tensors(server: ServerProcess) -> dict[str, int]:
    """Return how many large tensors the workers of the models `plus` and `same` have copied."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as response:
        text = response.read().decode()
    counts = dict(re.findall(r'^naiad_copied_tensors_total\{.*model="(plus|same)".*\} (\d+)', text, re.MULTILINE))
    return {name: int(count) for name, count in counts.items()}


def test_two_steps_may_change_the_tensor_that_both_read(repository: Path, write_model: WriteModel) -> None:
    join = TENSORS.replace('"IN"', '"X"').replace(
        "[{ name", '[{ name: "Y" data_type: TYPE_FP32 dims: [-1] }, { name', 1
    )
    write_model("join", join, JOIN)
    steps = (
        ("plus", "IN=A", "OUT=b"),
        ("plus", "IN=b", "OUT=c"),
        ("plus", "IN=b", "OUT=d"),
        ("join", "X=c Y=d", "OUT=Z"),
    )
    ensemble(repository, "diamond", *steps)
    with ServerProcess(repository) as server:
        values = [0.0] * 5000
        for _ in range(3):
            assert outputs(infer(server, "diamond", values)) == {"Z": [2002.0] * 5000}


def test_tensors_also_go_from_model_to_model_without_shared_memory(repository: Path) -> None:
    ensemble(repository, "chain", *CHAIN)
    with ServerProcess(repository, "--worker-shared-memory=false") as server:
        assert outputs(infer(server, "chain", [1.0] * 9000)) == {"Z": [4.0] * 9000}
        assert outputs(infer(server, "chain", [1.0])) == {"Z": [4.0]}


def test_strings_go_from_model_to_model(repository: Path, write_model: WriteModel) -> None:
    write_model("words", TENSORS.replace("FP32", "STRING"), WORDS)
    tensors = 'input [{ name: "A" data_type: TYPE_STRING dims: [-1] }]\n'
    tensors += 'output [{ name: "Z" data_type: TYPE_STRING dims: [-1] }]\n'
    ensemble(repository, "shout", ("words", "IN=A", "OUT=b"), ("words", "IN=b", "OUT=Z"), more=tensors)
    words = ["word", "sentence " * 2000]
    body = {"inputs": [{"name": "A", "datatype": "BYTES", "shape": [2], "data": words}]}
    with ServerProcess(repository) as server:
        request = urllib.request.Request(f"http://{server.url}/v2/models/shout/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["outputs"][0]["data"] == [word.upper() for word in words]


# ---- what clients get -----------------------------------------------------------------------


def test_an_output_goes_to_a_client_s_region_also_where_another_step_reads_it(repository: Path) -> None:
    httpclient = pytest.importorskip("tritonclient.http")
    shm = pytest.importorskip("tritonclient.utils.shared_memory")
    ensemble(repository, "both", ("plus", "IN=A", "OUT=Y"), ("plus", "IN=Y", "OUT=Z"), outputs="Y Z")
    values = np.arange(3000, dtype=np.float32)
    key = f"/naiad_{uuid.uuid4().hex}"
    region = shm.create_shared_memory_region("out", key, 2 * values.nbytes)
    try:
        with ServerProcess(repository) as server, httpclient.InferenceServerClient(server.url) as client:
            client.register_system_shared_memory("out", key, 2 * values.nbytes)
            given = httpclient.InferInput("A", [len(values)], "FP32")
            given.set_data_from_numpy(values)
            wanted = [httpclient.InferRequestedOutput("Y"), httpclient.InferRequestedOutput("Z")]
            for number, output in enumerate(wanted):
                output.set_shared_memory("out", values.nbytes, number * values.nbytes)
            for _ in range(2):
                client.infer("both", [given], outputs=wanted)
                found = shm.get_contents_as_numpy(region, np.float32, [2 * len(values)])
                assert np.array_equal(found, np.concatenate([values + 1, values + 2]))
                found[:] = 0
            client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(region)


def test_classes_have_the_labels_of_the_ensemble_also_where_another_step_reads_the_tensor(repository: Path) -> None:
    tensors = 'input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }]\n'
    tensors += 'output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }]\n'
    tensors += 'output [{ name: "Z" data_type: TYPE_FP32 dims: [-1] }]\n'
    ensemble(repository, "both", ("plus", "IN=A", "OUT=Y"), ("plus", "IN=Y", "OUT=Z"), more=tensors)
    (repository / "both" / "labels.txt").write_text("cat\ndog\nbird\n")
    wanted = [{"name": "Y", "parameters": {"classification": 2}}, {"name": "Z"}]
    with ServerProcess(repository) as server:
        response = infer(server, "both", [1.0, 9.0, 5.0], outputs=wanted)
    assert outputs(response) == {"Y": ["10.000000:1:dog", "6.000000:2:bird"], "Z": [3.0, 11.0, 7.0]}


def test_responses_of_a_stream_arrive_in_order_and_no_faster_than_the_client_reads(
    repository: Path, write_model: WriteModel
) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    write_model("stream", TENSORS + "model_transaction_policy { decoupled: true }", STREAM)
    config = repository / "plus" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [{ kind: KIND_CPU count: 2 }]\n")
    steps = (("stream", "IN=A", "OUT=b"), ("plus", "IN=b", "OUT=Z"))
    ensemble(repository, "streams", *steps)
    scheduling = repository / "streams" / "config.pbtxt"
    scheduling.write_text(
        scheduling.read_text().replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 4")
    )
    found: list[Any] = []
    done = threading.Event()

    def received(result: Any, error: Any) -> None:
        found.append(error if error is not None else float(result.as_numpy("Z")[0]))
        if len(found) == 300:
            done.set()

    with ServerProcess(repository) as server, grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(received)
        given = grpcclient.InferInput("A", [1], "FP32")
        given.set_data_from_numpy(np.zeros(1, np.float32))
        client.async_stream_infer("streams", [given])
        assert done.wait(60)
        client.stop_stream()
        assert found == [float(number + 1) for number in range(300)]
        with urllib.request.urlopen(f"http://{server.url}/v2/models/streams/stats", timeout=60) as response:
            (stats,) = json.loads(response.read())["model_stats"]
    assert stats["inference_stats"]["success"]["count"] == 1
    assert stats["inference_stats"]["compute_infer"]["ns"] > 0


# ---- what ends in the middle ----------------------------------------------------------------


def waiting(repository: Path, write_model: WriteModel) -> Path:
    """Add an ensemble whose second model waits. Returns the folder of that model."""
    write_model("waits", TENSORS, WAITS)
    ensemble(repository, "held", ("plus", "IN=A", "OUT=b"), ("waits", "IN=b", "OUT=c"), ("plus", "IN=c", "OUT=Z"))
    return repository / "waits" / "1"


@contextlib.contextmanager
def asked(server: ServerProcess, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Send a request whose second step waits; at the end of the block its response is in the list."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(infer(server, "held", [1.0] * 5000)))
    thread.start()
    wait_for((folder / "waits").exists)
    yield found
    thread.join()


def test_a_killed_worker_fails_the_ensemble_with_its_name_and_the_next_request_succeeds(
    repository: Path, write_model: WriteModel
) -> None:
    folder = waiting(repository, write_model)
    with ServerProcess(repository) as server:
        with asked(server, folder) as found:
            (pid,) = server.workers("waits")
            os.kill(pid, signal.SIGKILL)
        assert found[0]["status"] == 503
        assert found[0]["error"].startswith(
            "in ensemble 'held', the worker of model instance 'waits_0' was lost while "
        )
        (folder / "go").touch()
        assert outputs(infer(server, "held", [1.0] * 5000)) == {"Z": [4.0] * 5000}


def test_what_a_dead_worker_has_made_is_still_read_by_the_next_step(repository: Path, write_model: WriteModel) -> None:
    write_model("other", TENSORS, PLUS_ONE)
    folder = waiting(repository, write_model)
    steps = (("other", "IN=A", "OUT=b"), ("waits", "IN=A", "OUT=c"), ("join", "X=b Y=c", "OUT=Z"))
    join = TENSORS.replace('"IN"', '"X"').replace(
        "[{ name", '[{ name: "Y" data_type: TYPE_FP32 dims: [-1] }, { name', 1
    )
    write_model("join", join, JOIN)
    (repository / "held" / "config.pbtxt").unlink()
    (repository / "held" / "1").rmdir()
    (repository / "held").rmdir()
    ensemble(repository, "held", *steps)
    with ServerProcess(repository) as server:
        with asked(server, folder) as found:
            wait_for(lambda: '"inference_count":1' in server.get("/v2/models/other/stats")[1])
            (pid,) = server.workers("other")
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: pid not in server.workers("other"))
            (folder / "go").touch()
        assert outputs(found[0]) == {"Z": [2002.0] * 5000}


def test_models_may_be_unloaded_while_an_ensemble_uses_them(repository: Path, write_model: WriteModel) -> None:
    folder = waiting(repository, write_model)
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=held") as server:
        with asked(server, folder) as found:
            for model in ("plus", "waits"):
                post(server, f"/v2/repository/models/{model}/unload")
            refused = infer(server, "held", [1.0])
            assert refused["error"] == "Request for unknown model: 'held' has no available versions"
            (folder / "go").touch()
        assert outputs(found[0]) == {"Z": [4.0] * 5000}
        wait_for(lambda: not server.workers("plus") and not server.workers("waits"))
        post(server, "/v2/repository/models/held/load")
        assert outputs(infer(server, "held", [1.0])) == {"Z": [4.0]}


def test_a_server_that_stops_lets_its_ensembles_finish(repository: Path, write_model: WriteModel) -> None:
    folder = waiting(repository, write_model)
    server = ServerProcess(repository)
    server.start()
    try:
        with asked(server, folder) as found:
            server.terminate()
            wait_for(lambda: "Stopping: 1 requests in flight" in server.log)
            (folder / "go").touch()
        assert outputs(found[0]) == {"Z": [4.0] * 5000}
        assert server.wait() == 0
    finally:
        server.stop()


def test_a_client_that_goes_away_cancels_the_steps(repository: Path, write_model: WriteModel) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    write_model("stream", TENSORS + "model_transaction_policy { decoupled: true }", STREAM)
    folder = waiting(repository, write_model)
    ensemble(repository, "streams", ("stream", "IN=A", "OUT=b"), ("waits", "IN=b", "OUT=Z"))
    stream = repository / "stream" / "1"
    with ServerProcess(repository) as server:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(lambda result, error: None)
            given = grpcclient.InferInput("A", [1], "FP32")
            given.set_data_from_numpy(np.zeros(1, np.float32))
            client.async_stream_infer("streams", [given])
            wait_for((folder / "waits").exists)
            client.stop_stream(cancel_requests=True)
        wait_for(lambda: (stream / "sent").exists())
        (folder / "go").touch()
        wait_for((stream / "cancelled").exists)
        assert 0 < int((stream / "sent").read_text()) < 300
        assert outputs(infer(server, "held", [1.0])) == {"Z": [4.0]}
