"""The flight recorder and `naiad replay` with whole servers."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from bench.server import ServerFailed, ServerProcess, wait_for
from kernel.tools.recordings import RecordingIndex
from tests.end_to_end.sequence_models import OLDEST, accumulate, config

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.records.recording_format import RequestRecord, ResponseRecord
    from tests.end_to_end.conftest import WriteModel


pytestmark = pytest.mark.slow

TENSORS = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

#: Adds one, and changes its input while it does; an input that begins with -1 is an error, one with -2 an exception.
PLUS_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0] == -1:
                error = pb_utils.TritonError("minus one")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if value[0] == -2:
                raise ValueError(f"wrong, says {__file__}")
            out = value + ADDED
            if value.flags.writeable:
                value[:] = 77
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""

#: Sends each element of its input as a response.
EACH = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for a recording, which is not in the model repository."""
    return tmp_path_factory.mktemp("recording")


def plus(added: float) -> str:
    return f"ADDED = {added}\n{PLUS_ONE}"


def infer(server: ServerProcess, model: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        found = json.load(error)
    return found


def floats(*values: float, id: str = "") -> dict[str, Any]:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": list(values)}]
    return {"id": id, "inputs": inputs} if id else {"inputs": inputs}


def infer_large(server: ServerProcess, model: str, value: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(server.url) as client:
        tensor = http.InferInput("IN", [len(value)], "FP32")
        tensor.set_data_from_numpy(value)
        return client.infer(model, [tensor]).as_numpy("OUT")


def written(server: ServerProcess) -> int:
    found = re.search(r"^naiad_records_total (\d+)$", server.get("/metrics", server.metrics_port)[1], re.MULTILINE)
    assert found is not None
    return int(found[1])


def replay(folder: Path, to: str, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "kernel", "replay", str(folder), "--to", to, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode in (0, 1, 2), done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def only_model(report: dict[str, Any]) -> dict[str, Any]:
    (model,) = report["models"]
    assert isinstance(model, dict)
    return model


def exchanges(folder: Path) -> list[tuple[RequestRecord, list[ResponseRecord]]]:
    index = RecordingIndex(folder)
    return [index.load(each) for each in index.exchanges]


def test_a_replay_to_the_same_models_finds_no_difference_and_one_to_changed_models_does(
    write_model: WriteModel, folder: Path
) -> None:
    models = write_model("plus", TENSORS, plus(1))
    large = np.arange(50_000, dtype=np.float32)
    with ServerProcess(models, f"--record={folder}") as server:
        infer(server, "plus", floats(1, 2, id="first"))
        assert infer(server, "plus", floats(-1))["error"] == "minus one"
        assert "unexpected shape" in infer(server, "plus", {"inputs": [
            {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}]})["error"]  # fmt: skip
        assert "wrong, says plus/1/model.py" in infer(server, "plus", floats(-2))["error"], "clients see no whole paths"
        assert infer_large(server, "plus", large)[7] == 8
        wait_for(lambda: written(server) == 10)
    values = [request.inputs[0].data for request, _ in exchanges(folder)]
    assert values[4] == large.tobytes(), "the input as the client sent it, not as the model left it"
    with ServerProcess(models) as same:
        for to in (same.url, same.grpc_url):
            code, report = replay(folder, to)
            found = only_model(report)
            assert (code, report["differences"], found["sent"], found["outputs_compared"]) == (0, [], 5, 2)
    source = models / "plus" / "1" / "model.py"
    source.write_text(source.read_text().replace("ADDED = 1", "ADDED = 1.25"))
    with ServerProcess(models) as changed:
        code, report = replay(folder, changed.url, "--speed=0")
        assert (code, only_model(report)["differing"]) == (1, 2)
        assert report["differences"][0] == {
            "model": "plus", "id": "first",
            "text": "output 'OUT' differs in 2 of 2 elements, by at most 0.25; element 0 is 2.25, and recorded was 2.0",
        }  # fmt: skip
        assert replay(folder, changed.url, "--speed=0", "--atol=0.5")[0] == 0


def test_streams_of_decoupled_models_are_replayed_with_all_their_responses(
    write_model: WriteModel, folder: Path
) -> None:
    models = write_model("each", f"{TENSORS}\nmodel_transaction_policy {{ decoupled: true }}", EACH)
    with ServerProcess(models, f"--record={folder}") as server:
        body = json.dumps({"IN": [1, 2, 3]}).encode()
        url = f"http://{server.url}/v2/models/each/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            assert response.read().count(b"data: ") == 3
        wait_for(lambda: written(server) == 5)
    ((request, responses),) = exchanges(folder)
    assert request.decoupled
    assert [each.final for each in responses] == [False, False, False, True]
    with ServerProcess(models) as target:
        code, report = replay(folder, target.grpc_url)
        assert (code, only_model(report)["outputs_compared"]) == (0, 3)
        code, report = replay(folder, target.url)
        assert (code, report["models"]) == (2, [])
        assert report["skipped"] == {
            "not sent: the model may send any number of responses, which needs gRPC (--protocol grpc)": 1
        }


def test_sequences_are_replayed_in_their_order(write_model: WriteModel, folder: Path) -> None:
    models = write_model("sums", config(OLDEST), accumulate())

    def step(server: ServerProcess, id: int, value: int, **flags: bool) -> Any:
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        body = {"inputs": [tensor], "outputs": [{"name": "OUT"}], "parameters": {"sequence_id": id, **flags}}
        return infer(server, "sums", body)["outputs"][0]["data"]

    with ServerProcess(models, f"--record={folder}") as server:
        for id in (1, 2):
            step(server, id, id, sequence_start=True)
        for value in range(10):
            for id in (1, 2):
                step(server, id, value * id)
        assert [step(server, id, 0, sequence_end=True) for id in (1, 2)] == [[46], [92]]
        wait_for(lambda: written(server) == 48)
    with ServerProcess(models) as target:
        code, report = replay(folder, target.grpc_url, "--speed=0")
        assert (code, report["differences"], only_model(report)["outputs_compared"]) == (0, [], 24)


def test_digests_of_outputs_find_differences_and_digests_of_inputs_are_not_sent(
    write_model: WriteModel, folder: Path
) -> None:
    models = write_model("plus", TENSORS, plus(1))
    outputs, both = folder / "outputs", folder / "both"
    for each, setting in ((outputs, "outputs=digest,tensor-limit=2MiB"), (both, "tensors=digest")):
        with ServerProcess(models, f"--record={each},{setting}") as server:
            infer(server, "plus", floats(1))
            infer_large(server, "plus", np.arange(300_000, dtype=np.float32))
            wait_for(lambda server=server: written(server) == 4)  # type: ignore[misc]
    assert sum(path.stat().st_size for path in both.iterdir()) < 4096
    source = models / "plus" / "1" / "model.py"
    with ServerProcess(models) as same:
        code, report = replay(outputs, same.url)
        assert (code, only_model(report)["outputs_compared"]) == (0, 2)
        code, report = replay(both, same.url)
        assert (code, report["models"], list(report["skipped"].values())) == (2, [], [2])
    source.write_text(source.read_text().replace("ADDED = 1", "ADDED = 2.0"))
    with ServerProcess(models) as changed:
        code, report = replay(outputs, changed.url)
        assert [each["text"] for each in report["differences"]] == [
            "output 'OUT' differs; only its digest was recorded"
        ] * 2  # fmt: skip


def test_tensors_that_are_too_large_are_left_out_and_said_to_be(write_model: WriteModel, folder: Path) -> None:
    models = write_model("plus", TENSORS, plus(1))
    with ServerProcess(models, f"--record={folder},tensor-limit=100KiB") as server:
        infer_large(server, "plus", np.arange(100_000, dtype=np.float32))
        wait_for(lambda: written(server) == 2)
    ((request, (response,)),) = exchanges(folder)
    assert (request.inputs[0].byte_size, request.inputs[0].missing) == (400_000, "larger than the recorder's limit")
    assert response.outputs is not None
    assert response.outputs[0].sha256 is not None


def test_regions_of_clients_are_recorded_by_their_names(write_model: WriteModel, folder: Path) -> None:
    http = pytest.importorskip("tritonclient.http")
    shm = pytest.importorskip("tritonclient.utils.shared_memory")
    models = write_model("plus", TENSORS, plus(1))
    with (
        ServerProcess(models, f"--record={folder}") as server,
        http.InferenceServerClient(server.url) as client,
    ):
        region = shm.create_shared_memory_region("rec", f"/naiad_rec_{os.getpid()}", 64)
        try:
            client.register_system_shared_memory("rec", f"/naiad_rec_{os.getpid()}", 64)
            shm.set_shared_memory_region(region, [np.ones(4, np.float32)])
            tensor, wanted = http.InferInput("IN", [4], "FP32"), http.InferRequestedOutput("OUT")
            tensor.set_shared_memory("rec", 16)
            wanted.set_shared_memory("rec", 16, offset=32)
            client.infer("plus", [tensor], outputs=[wanted])
            wait_for(lambda: written(server) == 2)
        finally:
            client.unregister_system_shared_memory()
            shm.destroy_shared_memory_region(region)
    ((request, (response,)),) = exchanges(folder)
    (given,) = request.inputs
    assert (given.region, given.offset, given.byte_size, given.data) == ("rec", 0, 16, None)
    assert [(each.region, each.offset, each.byte_size) for each in request.outputs] == [("rec", 32, 16)]
    assert response.outputs is not None
    assert [(each.region, each.offset) for each in response.outputs] == [("rec", 32)]


def test_a_recording_is_readable_after_the_server_was_killed(write_model: WriteModel, folder: Path) -> None:
    models = write_model("plus", TENSORS, plus(1))
    with ServerProcess(models, f"--record={folder}") as server:
        for value in range(20):
            infer(server, "plus", floats(value))
        wait_for(lambda: written(server) == 40)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    (segment,) = folder.glob("*.naiadrec")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 5)  # as if it had been killed while it wrote
    with ServerProcess(models, f"--record={folder},rate:other=1,rate=0") as target:
        code, report = replay(folder, target.url)
        assert (code, only_model(report)["sent"]) == (0, 19)
        assert report["skipped"] == {"not compared: they have no final response in the recording": 1}
        assert any("no complete record in its last" in note for note in report["notes"])
        with (
            pytest.raises(ServerFailed, match=f"another server records in '{folder}'"),
            ServerProcess(models, f"--record={folder}"),
        ):
            pytest.fail("two servers recorded in one folder")


def test_a_full_disk_stops_the_recording_and_not_the_server(write_model: WriteModel, folder: Path) -> None:
    models = write_model("plus", TENSORS, plus(1))
    with ServerProcess(models, f"--record={folder}") as server:
        infer(server, "plus", floats(1))
        wait_for(lambda: written(server) == 2)
        size = sum(path.stat().st_size for path in folder.iterdir())
        for child in psutil.Process(server.pid).children(recursive=True):
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        assert infer(server, "plus", floats(2))["outputs"][0]["data"] == [3]
        wait_for(lambda: "recording stops until the server is started again" in server.log)
        assert infer(server, "plus", floats(3))["outputs"][0]["data"] == [4]
        assert written(server) == 2
    assert len(exchanges(folder)) == 1


def test_only_the_chosen_part_of_requests_is_recorded(write_model: WriteModel, folder: Path) -> None:
    write_model("often", TENSORS, plus(1))
    models = write_model("seldom", TENSORS, plus(1))
    with ServerProcess(models, f"--record={folder},rate=4,rate:often=1") as server:
        for value in range(8):
            infer(server, "often", floats(value))
            infer(server, "seldom", floats(value))
        wait_for(lambda: written(server) == 20)
    found = [request.model for request, _ in exchanges(folder)]
    assert (found.count("often"), found.count("seldom")) == (8, 2)
