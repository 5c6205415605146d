"""Which requests and responses go to a helper: none of which the server has no bytes to encode or decode.

The way to a helper and back costs more than the rest of a small request. `HelperPool.start` is where every task of a
front door begins, so its calls are counted.
"""

from __future__ import annotations

import gzip
import http.client
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.helper.pool import HelperPool
from bench.models import PYTHON_MODELS, write_python_model
from kernel.embedding import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.serving.helper_tasks import HelperTask

BYTE_SIZE = 1 << 20
SHAPE = [1, BYTE_SIZE // 4]
RAMP = np.arange(BYTE_SIZE // 4, dtype=np.float32)


class Lab:
    """A server with an identity model, a region of a client (the input, and behind it the output), and the tasks."""

    def __init__(self, server: EmbeddedServer, tasks: list[str]) -> None:
        self.server = server
        self.tasks = tasks
        self.region = f"naiad_test_{uuid.uuid4().hex}"
        self.path = Path("/dev/shm", self.region)
        self.restore()
        place = {"key": f"/{self.region}", "offset": 0, "byte_size": 2 * BYTE_SIZE}
        self.post(f"/v2/systemsharedmemory/region/{self.region}/register", json.dumps(place).encode())

    def restore(self) -> None:
        self.path.write_bytes(RAMP.tobytes() + bytes(BYTE_SIZE))

    def close(self) -> None:
        self.path.unlink()

    def post(self, target: str, body: bytes, **headers: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.ports["http"], timeout=60)
        try:
            connection.request("POST", target, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            return content
        finally:
            connection.close()

    def place(self, offset: int) -> dict[str, Any]:
        return {
            "shared_memory_region": self.region,
            "shared_memory_byte_size": BYTE_SIZE,
            "shared_memory_offset": offset,
        }

    def body_in_region(self) -> bytes:
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": SHAPE, "parameters": self.place(0)}
        output = {"name": "OUTPUT0", "parameters": self.place(BYTE_SIZE)}
        return json.dumps({"inputs": [tensor], "outputs": [output]}).encode()

    def output_in_region(self) -> bytes:
        output = self.path.read_bytes()[BYTE_SIZE:]
        self.restore()
        return output


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    models = tmp_path_factory.mktemp("models")
    write_python_model(models / "identity", *PYTHON_MODELS["identity"])
    tasks: list[str] = []
    add = HelperPool.add

    def noted(pool: HelperPool, task: HelperTask) -> None:
        tasks.append(task.name)
        add(pool, task)

    with (
        pytest.MonkeyPatch.context() as patch,
        EmbeddedServer(models, http_port=0, grpc_port=0) as server,
    ):
        patch.setattr(HelperPool, "add", noted)
        lab = Lab(server, tasks)
        try:
            yield lab
        finally:
            lab.close()


@pytest.fixture
def lab(module_lab: Lab) -> Lab:
    module_lab.tasks.clear()
    return module_lab


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_http_tensors_in_the_clients_region_need_no_helper(lab: Lab, encoding: str) -> None:
    lab.post("/v2/models/identity/infer", lab.body_in_region(), Accept_Encoding=encoding)
    assert lab.output_in_region() == RAMP.tobytes()
    assert lab.tasks == []


def test_http_tensors_in_the_clients_region_of_a_compressed_request_need_no_helper(lab: Lab) -> None:
    lab.post("/v2/models/identity/infer", gzip.compress(lab.body_in_region()), Content_Encoding="gzip")
    assert lab.output_in_region() == RAMP.tobytes()
    assert lab.tasks == []


def test_large_binary_tensors_over_http_need_no_helper(lab: Lab) -> None:
    parameters = {"binary_data_size": BYTE_SIZE}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": SHAPE, "parameters": parameters}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    content = lab.post(
        "/v2/models/identity/infer",
        header + RAMP.tobytes(),
        Content_Type="application/octet-stream",
        Inference_Header_Content_Length=str(len(header)),
    )
    assert content.endswith(RAMP.tobytes())
    assert lab.tasks == []


def test_a_raw_request_needs_no_helper(lab: Lab) -> None:
    content = lab.post(
        "/v2/models/identity/infer",
        RAMP.tobytes(),
        Content_Type="application/octet-stream",
        Inference_Header_Content_Length="0",
    )
    assert content.endswith(RAMP.tobytes())
    assert lab.tasks == []


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_small_bodies_of_generate_need_no_helper(lab: Lab, call: str) -> None:
    content = lab.post(f"/v2/models/identity/{call}", b'{"INPUT0": [1, 2, 3]}')
    assert b'"OUTPUT0":[1.0,2.0,3.0]' in content
    assert lab.tasks == []


def test_grpc_tensors_in_the_clients_region_need_no_helper(lab: Lab) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    tensor = grpcclient.InferInput("INPUT0", SHAPE, "FP32")
    tensor.set_shared_memory(lab.region, BYTE_SIZE)
    output = grpcclient.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(lab.region, BYTE_SIZE, BYTE_SIZE)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{lab.server.ports['grpc']}") as client:
        client.infer("identity", [tensor], outputs=[output])
    assert lab.output_in_region() == RAMP.tobytes()
    assert lab.tasks == []


def test_large_raw_tensors_over_grpc_need_no_helper(lab: Lab) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    tensor = grpcclient.InferInput("INPUT0", SHAPE, "FP32")
    tensor.set_data_from_numpy(RAMP.reshape(SHAPE))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{lab.server.ports['grpc']}") as client:
        result = client.infer("identity", [tensor])
    assert result.as_numpy("OUTPUT0").tobytes() == RAMP.tobytes()
    assert lab.tasks == []


def test_large_outputs_that_become_json_need_a_helper(lab: Lab) -> None:
    """The tasks are counted: this response has bytes to encode, and so the list is not empty."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": SHAPE, "parameters": lab.place(0)}
    content = lab.post("/v2/models/identity/infer", json.dumps({"inputs": [tensor]}).encode())
    assert json.loads(content)["outputs"][0]["data"] == RAMP.tolist()
    assert lab.tasks == ["http.encode_infer"]
