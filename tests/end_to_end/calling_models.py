"""Models that call others, and an embedded server that serves them, for the tests of calls."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel.serving.request import Request
from shm.tensor import Tensor
from tests.end_to_end.server_threads import server_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from kernel.embedding.server import ServerThread
    from kernel.serving.kernel import Kernel
    from kernel.serving.response import Response
    from shm.arrays import Array

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

DECOUPLED = "model_transaction_policy { decoupled: true }\n"

HEAD = """
import asyncio
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def given(request):
    return pb_utils.get_input_tensor_by_name(request, "IN")


def call(model, tensor, **more):
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUT"], inputs=[tensor], **more)


def out(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(array, np.float32))])


def passed(response):
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    return out(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy())


"""

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        return [out(given(request).as_numpy() * 2) for request in requests]
"""

#: Calls `double`.
CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("double", given(request)).exec()) for request in requests]
"""


class Models:
    """Writes models into a repository."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, source: str, config: str = "", *, instances: int = 1) -> None:
        (self.path / name / "1").mkdir(parents=True)
        group = f"instance_group [ {{ count: {instances} }} ]\n"
        (self.path / name / "config.pbtxt").write_text(CONFIG + config + group)
        (self.path / name / "1" / "model.py").write_text(HEAD + textwrap.dedent(source))

    @contextlib.contextmanager
    def served(self, **flags: Any) -> Iterator[Served]:
        """Serve the models in this process while the `with` block lasts. At its end nothing may be held."""
        with server_thread(self.path, **{"model_control_mode": "explicit", "load_model": "*", **flags}) as thread:
            served = Served(thread)
            yield served
            thread.run(served.settle)


class Sink:
    """Collects the responses of a request."""

    peer = ""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.final: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Called with each response.
        self.on_response: Callable[[Response], None] = lambda response: None

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        self.responses.append(response)
        self.on_response(response)
        if response.final:
            self.final.set_result(None)


class Served:
    """A running server."""

    def __init__(self, thread: ServerThread) -> None:
        self.thread = thread

    @property
    def kernel(self) -> Kernel:
        return self.thread.kernel

    def run(self, work: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 40) -> None:
        async def limited() -> None:
            async with asyncio.timeout(timeout_s):
                await work()

        self.thread.run(limited)

    def submit(self, model: str, array: Array, *, streaming: bool = False) -> tuple[Request, Sink]:
        sink = Sink()
        tensor = Tensor("IN", "FP32", list(array.shape), np.ascontiguousarray(array, np.float32).tobytes())
        request = Request(model, [tensor], sink, streaming=streaming)
        self.kernel.submit(request)
        return request, sink

    async def ask(self, model: str, array: Array) -> Array | str:
        """Return the output of a model, or its error."""
        _, sink = self.submit(model, array)
        await sink.final
        return value_of(sink.responses[-1])

    async def numbers(self, model: str, *values: float) -> list[float] | str:
        found = await self.ask(model, np.array(values, np.float32))
        return found if isinstance(found, str) else found.tolist()

    def memory(self) -> dict[str, int]:
        """Return the leased blocks and the calls of each model's workers."""
        found: dict[str, int] = {}
        for model in self.kernel.catalog.executing_models():
            for instance in model.instances.serving:
                memory, calls = instance.memory, instance.worker_calls  # type: ignore[attr-defined]
                arena = getattr(memory, "output_arena", None)  # a worker that shares no memory has none
                found[f"{instance.name} blocks"] = 0 if arena is None else arena.leased_block_count
                arenas = getattr(memory, "device_arenas", {})
                found[f"{instance.name} blocks on a GPU"] = sum(each.leased_block_count for each in arenas.values())
                found[f"{instance.name} calls"] = 0 if calls is None else calls.open_count
                found[f"{instance.name} results"] = 0 if calls is None else calls.result_count
            arena = model.input_arena
            found[f"{model.name} inputs"] = 0 if arena is None else arena.allocator.used_bytes
        return {what: count for what, count in found.items() if count}

    async def settle(self) -> None:
        """Wait until no memory is leased: workers report soon what their models have dropped."""
        async with asyncio.timeout(60):
            await until(lambda: not self.memory())
        self.kernel.check()
        assert not len(self.kernel.calls.waits), "calls wait that nobody has made"


def value_of(response: Response) -> Array | str:
    """Return the output of a response, or its error, and release it."""
    if response.error is not None:
        return response.error.message
    assert response.outputs is not None, "an empty response"
    (output,) = response.outputs
    found = np.frombuffer(output.raw(), np.float32).copy()
    response.release()
    return found


async def until(condition: Callable[[], object]) -> None:
    """Wait for something of which there is no event. The test's time limit ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
