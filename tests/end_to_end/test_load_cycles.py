"""Models that are loaded, reloaded and unloaded for ever leave nothing in the kernel: no memory, no descriptor."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.machine import memory_of
from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

#: Models that are loaded at the same time, and how often each, after a first round that is not measured.
MODELS = ("a", "b", "c", "d")
FIRST, CYCLES = 5, 50

#: Large enough for blocks of arenas on both sides.
BODY = 100_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    for name in MODELS:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        yield server


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> bytes:
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    content = response.read()
    assert response.status == 200, content
    return content


def cycle(server: ServerProcess, repository: Path, name: str, count: int) -> None:
    """Load a model, use it, reload it, use it, unload it; `count` times."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [BODY], "parameters": {"binary_data_size": BODY}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    config = repository / name / "config.pbtxt"
    for number in range(count):
        for _ in range(2):
            post(connection, f"/v2/repository/models/{name}/load")
            assert post(connection, f"/v2/models/{name}/infer", head + bytes(BODY), headers).endswith(bytes(BODY))
            config.write_text(f"{CONFIG}# {name} {number} {os.urandom(4).hex()}\n")
            (repository / name / "1" / "weights").write_text(str(os.urandom(4).hex()))
        post(connection, f"/v2/repository/models/{name}/unload")
    connection.close()


def descriptors(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has."""
    found = Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[os.readlink(entry).partition(":[")[0]] += 1
        except OSError:
            continue
    return found


def cycles(server: ServerProcess, repository: Path, count: int) -> None:
    """Run the cycles of all models at the same time, and wait until nothing of them is left."""
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            cycle(server, repository, name, count)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in MODELS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    wait_for(lambda: not server.workers())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_loads_reloads_and_unloads_leave_neither_memory_nor_descriptors(
    server: ServerProcess, tmp_path: Path
) -> None:
    cycles(server, tmp_path, FIRST)
    before, open_before = memory_of(server.pid), descriptors(server.pid)
    cycles(server, tmp_path, CYCLES)
    # Fewer are right, too: connections of the first round may not have been closed then.
    wait_for(lambda: not descriptors(server.pid) - open_before)
    wait_for(lambda: memory_of(server.pid).resident - before.resident <= 2 << 20)
