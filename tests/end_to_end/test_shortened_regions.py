"""Clients that shorten their shared memory while a model uses it cost the model one worker, and others go on."""

from __future__ import annotations

import http.client
import json
import os
import struct
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import WriteModel

SIZE = 1 << 16
CONFIG = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""

# Waits while there is a file "hold" beside it, and only then reads its input.
SUMS = """
import os, time
FOLDER = pb_utils.get_model_dir()

class TritonPythonModel:
    def execute(self, requests):
        open(os.path.join(FOLDER, "executing"), "w").close()
        while os.path.exists(os.path.join(FOLDER, "hold")):
            time.sleep(0.001)
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + array.sum())]))
        return responses
"""


class Region:
    """A region of a client: the input, and behind it the output."""

    def __init__(self, server: ServerProcess) -> None:
        self.name = f"naiad_test_{uuid.uuid4().hex}"
        self.path = Path("/dev/shm", self.name)
        self._server = server
        self.restore()
        self.register()

    def restore(self) -> None:
        self.path.write_bytes(struct.pack("<f", 1) * (SIZE // 4) + bytes(SIZE))

    def register(self) -> None:
        body = {"key": f"/{self.name}", "offset": 0, "byte_size": 2 * SIZE}
        assert call(self._server, f"/v2/systemsharedmemory/region/{self.name}/register", body) == (200, None)

    def shorten(self) -> None:
        os.truncate(self.path, 0)

    def infer(self, *, output_in_region: bool = False) -> tuple[int, Any]:
        place = {"shared_memory_region": self.name, "shared_memory_byte_size": SIZE}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [SIZE // 4], "parameters": place}
        body: dict[str, Any] = {"inputs": [tensor]}
        if output_in_region:
            body["outputs"] = [{"name": "OUT", "parameters": {**place, "shared_memory_offset": SIZE}}]
        status, document = call(self._server, "/v2/models/sums/infer", body)
        return status, document.get("error") if status != 200 else document["outputs"][0].get("data", [None])[0]

    def output(self) -> float:
        [value] = struct.unpack_from("<f", self.path.read_bytes(), SIZE)
        return float(value)

    def close(self) -> None:
        self.path.unlink()


def call(server: ServerProcess, path: str, body: object) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    document = json.loads(response.read() or "null")
    connection.close()
    return response.status, document


class Hold:
    """Holds the model up, from its next execution on."""

    def __init__(self, repository: Path) -> None:
        self._executing = repository / "sums/1/executing"
        self._hold = repository / "sums/1/hold"

    def begin(self) -> None:
        self._executing.unlink(missing_ok=True)
        self._hold.touch()

    def wait(self) -> None:
        wait_for(self._executing.exists)

    def end(self) -> None:
        self._hold.unlink()


class Asked(threading.Thread):
    """A request that waits for its response."""

    def __init__(self, region: Region, *, output_in_region: bool = False) -> None:
        super().__init__()
        self.result: tuple[int, Any] = (0, "")
        self._region = region
        self._output_in_region = output_in_region
        self.start()

    def run(self) -> None:
        self.result = self._region.infer(output_in_region=self._output_in_region)

    def response(self) -> tuple[int, Any]:
        self.join(60)
        return self.result


def workers_lost(server: ServerProcess) -> int:
    page = server.get("/metrics", server.metrics_port)[1]
    [line] = [line for line in page.splitlines() if line.startswith("naiad_worker_lost_total{")]
    return int(line.split()[-1])


@pytest.fixture
def repository(write_model: WriteModel) -> Path:
    return write_model("sums", CONFIG, SUMS)


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository) as made:
        yield made


def test_clients_that_shorten_their_regions_cost_a_model_one_worker(repository: Path, server: ServerProcess) -> None:
    expected = 1 + SIZE // 4
    good, hold = Region(server), Hold(repository)
    hostile = [Region(server) for _ in range(4)]
    assert good.infer() == (200, expected)

    # The first time, the region is mapped, and the worker dies.
    hold.begin()
    first = Asked(hostile[0])
    hold.wait()
    hostile[0].shorten()
    hold.end()
    status, error = first.response()
    assert status == 503
    assert "SIGBUS" in error
    assert hostile[0].infer()[1] == f"Unable to find shared memory region: '{hostile[0].name}'"

    # From now on, the input is a copy: shortening the region while the model executes changes nothing.
    hold.begin()
    during = Asked(hostile[1])
    hold.wait()
    hostile[1].shorten()
    waiting = Asked(hostile[2])
    in_flight = 'naiad_inference_in_flight_requests{model="sums",version="1"} 2'
    wait_for(lambda: in_flight in server.get("/metrics", server.metrics_port)[1])
    hostile[2].shorten()
    hold.end()
    assert during.response() == (200, expected)
    assert waiting.response() == (400, "shared memory region was truncated by its owner"), (
        "it is read when it is executed"
    )

    hold.begin()
    writing = Asked(hostile[3], output_in_region=True)
    hold.wait()
    hostile[3].shorten()
    hold.end()
    assert writing.response() == (400, "shared memory region was truncated by its owner")

    # And so with a region that is registered again, in a loop.
    hostile[0].restore()
    hostile[0].register()
    for _ in range(20):
        hold.begin()
        again = Asked(hostile[0])
        hold.wait()
        hostile[0].shorten()
        hostile[0].restore()
        hold.end()
        assert again.response() == (200, expected)
        assert good.infer() == (200, expected)
    assert good.infer(output_in_region=True) == (200, None)
    assert good.output() == expected
    assert workers_lost(server) == 1
    server.wait_for_log("are copied instead of mapped")
    for region in (good, *hostile):
        region.close()
