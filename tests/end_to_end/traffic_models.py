"""A model `m` with versions, and clients of it over both protocols, for tests of traffic between versions."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.server import ServerProcess

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

ALL_VERSIONS = "version_policy { all { } }\n"


def write_model(repository: Path, code: str, rule: str = "", versions: tuple[int, ...] = (3, 4)) -> None:
    """Write the model into a repository, with the same code for all versions, which are all loaded."""
    for version in versions:
        folder = repository / "m" / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
    (repository / "m" / "config.pbtxt").write_text(CONFIG + ALL_VERSIONS)
    if rule:
        (repository / "m" / "traffic.toml").write_text(rule)


def call(server: ServerProcess, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Return the JSON of a response; a request with a body is a POST."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{server.url}{path}", data, headers or {})) as response:
        return json.load(response)


def adds_its_version(version: str, value: float) -> float:
    """Return the output of a model that adds the number of its version."""
    return value + float(version)


async def load(
    server: ServerProcess,
    clients: int,
    output: Callable[[str, float], float] = adds_its_version,
    *,
    each: int | None = None,
    until: Callable[[], bool] | None = None,
    user_of: Callable[[int, int], str] | None = None,
    got: Callable[[str, str], None] | None = None,
) -> Counter[str]:
    """Send requests of clients over both protocols, small and large; returns how many responses there were, by version.

    Each client sends `each` requests, or as many as it can `until` something is true; then errors count as "error". A
    response must have the id of its request, and the outputs of the version that it names. `user_of` returns the header
    `x-user` for the number of a client and of its request, `got` hears of the user and the version.
    """
    counts: Counter[str] = Counter()
    stop = False

    async def one(number: int) -> None:
        kind: Any = tritonclient.http.aio if number % 2 else tritonclient.grpc.aio
        async with kind.InferenceServerClient(server.url if number % 2 else server.grpc_url) as client:
            turn = 0
            while not stop and turn != each:
                turn += 1
                value, id = number * 10_000.0 + turn, f"{number}-{turn}"
                tensor = kind.InferInput("IN", [2 if turn % 3 else 5000], "FP32")
                tensor.set_data_from_numpy(np.full(tensor.shape(), value, np.float32))
                user = "" if user_of is None else user_of(number, turn)
                try:
                    found = await client.infer("m", [tensor], request_id=id, headers={"x-user": user} if user else None)
                except InferenceServerException:
                    if until is None:
                        raise
                    counts["error"] += 1
                    continue
                response = found.get_response()
                if not isinstance(response, dict):
                    response = {"id": response.id, "model_version": response.model_version}
                version = response["model_version"]
                assert response["id"] == id
                assert set(found.as_numpy("OUT").tolist()) == {output(version, value)}
                counts[version] += 1
                if got is not None:
                    got(user, version)

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    if until is not None:
        while not await asyncio.to_thread(until):
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()
        stop = True
    await asyncio.gather(*tasks)
    return counts
