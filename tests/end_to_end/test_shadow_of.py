"""`naiad shadow-of` in front of a server that clients use: they notice nothing, and the report says what differs."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

#: The new one has other numbers for inputs that begin with a multiple of 10.
CODE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2
            if NEW and value[0] % 20 == 0:
                value = value + value
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


def write(folder: Path, *, new: bool) -> Path:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    (folder / "m" / "1" / "model.py").write_text(CODE.replace("NEW", str(new)))
    return folder


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        ServerProcess(write(tmp_path / "old", new=False)) as old,
        ServerProcess(write(tmp_path / "new", new=True)) as ours,
    ):
        yield old, ours


class Proxy:
    """The command, as a process."""

    def __init__(self, url: str, ours: str, *more: str) -> None:
        command = [sys.executable, "-m", "kernel", "shadow-of", url, "--server", ours, "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.match(r"port (\d+) of", line)
        assert found is not None, line
        self.url = f"127.0.0.1:{found[1]}"

    def end(self) -> tuple[int, str]:
        """End it as Ctrl-C does; returns the exit code and the report."""
        self.process.send_signal(signal.SIGINT)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


async def load(kind: Any, url: str, clients: int, each: int, *, binary: bool = True) -> None:
    async def one(number: int) -> None:
        client = kind.InferenceServerClient(url)
        for turn in range(each):
            value = number * 1000 + turn + 1
            tensor = kind.InferInput("IN", [2 if turn % 3 else 5000], "FP32")
            array = np.full(tensor.shape(), value, np.float32)
            if kind is tritonclient.http.aio:
                tensor.set_data_from_numpy(array, binary_data=binary)
            else:
                tensor.set_data_from_numpy(array)
            found = await client.infer("m", [tensor], request_id=str(value))
            assert set(found.as_numpy("OUT").tolist()) == {2.0 * value}, "the response of the old server"
        await client.close()

    await asyncio.gather(*(one(number) for number in range(clients)))


def test_clients_get_the_responses_of_the_old_server_and_the_report_says_what_differs(
    servers: tuple[ServerProcess, ServerProcess],
) -> None:
    old, ours = servers
    proxy = Proxy(old.url, ours.url, "--waiting", "10000", "--json")
    asyncio.run(load(tritonclient.http.aio, proxy.url, 8, 20))
    asyncio.run(load(tritonclient.http.aio, proxy.url, 2, 5, binary=False))
    deadline = time.monotonic() + 60
    while ours.get("/v2/models/m/stats")[1].count('"inference_count":170') == 0 and time.monotonic() < deadline:
        asyncio.run(asyncio.sleep(0.1))
    code, out = proxy.end()
    report = json.loads(out)
    assert (code, report["sampled"], report["pairs"], report["dropped"]) == (1, 170, 170, {})
    assert report["different"] == 16, "two of 20 requests of 8 clients; the five of others begin with no multiple of 10"
    assert all(re.search(r"request '\d*0': output 'OUT' values", line) for line in report["differing"])


def test_grpc_is_passed_on_without_a_comparison(servers: tuple[ServerProcess, ServerProcess]) -> None:
    old, ours = servers
    proxy = Proxy(old.grpc_url, ours.url)
    asyncio.run(load(tritonclient.grpc.aio, proxy.url, 4, 5))
    code, out = proxy.end()
    assert code == 2
    assert re.search("connections passed on without a comparison: [1-4] ", out), out


def test_a_naiad_server_that_is_gone_costs_no_client_a_response(servers: tuple[ServerProcess, ServerProcess]) -> None:
    old, ours = servers
    proxy = Proxy(old.url, ours.url)
    ours.stop()
    asyncio.run(load(tritonclient.http.aio, proxy.url, 4, 10))
    code, out = proxy.end()
    assert code == 2
    assert "our server has not responded" in out
