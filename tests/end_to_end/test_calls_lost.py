"""Workers that die while a model calls another one: each request gets one response, and nothing stays leased."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.end_to_end.calling_models import CALLER, DECOUPLED, Models, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.calling_models import Served

#: Dies where the first value of its input says, else doubles.
DIES = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if given(request).as_numpy()[0] == 1:
                os.kill(os.getpid(), 9)
        return [out(given(request).as_numpy() * 2) for request in requests]
"""

#: Dies at one of several points of a call.
CALLER_DIES = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        (request,) = requests
        point = int(given(request).as_numpy()[0])
        array = np.full(len(given(request).as_numpy()), 0, np.float32)
        if point == 1:
            threading.Thread(target=call("slow", pb_utils.Tensor("IN", array)).exec, daemon=True).start()
            time.sleep(0.05)
            os.kill(os.getpid(), 9)
        response = call("slow", pb_utils.Tensor("IN", array)).exec()
        self.kept.append(response)
        if point == 2:
            os.kill(os.getpid(), 9)
        result = out(response.output_tensors()[0].as_numpy())
        if point == 3:
            request.get_response_sender().send(result, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            os.kill(os.getpid(), 9)
        self.kept.clear()
        return [result]
"""

SLOW = """
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.1)
        return [out(given(request).as_numpy() + 7) for request in requests]
"""

STREAM_DIES = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(100):
                if number == 50:
                    os.kill(os.getpid(), 9)
                sender.send(out(np.full(3000, number)))
        return None
"""

STREAM_CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            responses = list(call("stream", given(request)).exec(decoupled=True))
            last = responses[-1]
            found.append(passed(last) if last.has_error() else out([len(responses)]))
        return found
"""


async def restarted(server: Served, model: str) -> None:
    await until(lambda: server.kernel.model_ready(model))


@pytest.mark.parametrize("size", [4, 50_000])
@pytest.mark.parametrize("flags", [{}, {"worker_shared_memory": False}], ids=["shared memory", "copies"])
def test_a_called_model_that_dies_is_an_error_of_the_call(tmp_path: Path, size: int, flags: dict[str, bool]) -> None:
    models = Models(tmp_path)
    models.add("dies", DIES)
    models.add("caller", CALLER.replace("double", "dies"))
    with models.served(**flags) as server:

        async def run() -> None:
            for _ in range(2):
                found = await server.ask("caller", np.ones(size))
                assert "the worker of model instance 'dies_0" in str(found)
                assert "was lost" in str(found)
                await restarted(server, "dies")
                assert not isinstance(await server.ask("caller", np.zeros(size)), str)

        server.run(run)


@pytest.mark.parametrize("size", [4, 50_000])
@pytest.mark.parametrize("point", [1, 2, 3])
@pytest.mark.parametrize("flags", [{}, {"worker_shared_memory": False}], ids=["shared memory", "copies"])
def test_a_caller_that_dies_leaves_nothing(tmp_path: Path, size: int, point: int, flags: dict[str, bool]) -> None:
    models = Models(tmp_path)
    models.add("slow", SLOW)
    models.add("caller", CALLER_DIES)
    with models.served(**flags) as server:

        async def run() -> None:
            found = await server.ask("caller", np.full(size, point))
            assert "was lost" in str(found), "the response is kept until the batch ends, and is lost as well"
            await restarted(server, "caller")
            again = await server.ask("caller", np.full(size, 0))
            assert not isinstance(again, str)
            assert again[0] == 7

        server.run(run)


def test_a_stream_that_ends_by_the_death_of_its_model_ends_with_an_error(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("stream", STREAM_DIES, DECOUPLED)
    models.add("caller", STREAM_CALLER)
    with models.served() as server:

        async def run() -> None:
            assert "was lost" in str(await server.numbers("caller", 1))

        server.run(run)


def test_a_model_that_is_unloaded_while_it_executes_a_call_finishes_it(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("slow", SLOW)
    models.add("caller", CALLER.replace("double", "slow"))
    with models.served() as server:

        async def run() -> None:
            _, sink = server.submit("caller", np.zeros(50_000))
            await until(lambda: server.kernel.resolve("slow").in_flight)
            await server.kernel.repository.unload("slow")
            await sink.final
            assert sink.responses[0].error is None
            sink.responses[0].release()
            assert "unknown model: 'slow' has no available versions" in str(await server.numbers("caller", 1))

        server.run(run)


def test_a_server_that_drains_lets_models_call(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("slow", SLOW)
    models.add("caller", CALLER.replace("double", "slow").replace("return [", "time.sleep(0.3)\n        return ["))
    with models.served() as server:

        async def run() -> None:
            _, sink = server.submit("caller", np.zeros(4))
            await asyncio.sleep(0)
            await server.kernel.drain()
            await sink.final
            assert sink.responses[0].error is None

        server.run(run)


#: Dies after it has taken some responses, from a coroutine or from `execute` itself.
STREAM_CALLER_DIES = """
class TritonPythonModel:
    {kind} execute(self, requests):
        for request in requests:
            stream = {wait} call("stream", given(request)).{name}(decoupled=True)
            for _ in range(int(given(request).as_numpy()[0])):
                next(stream)
            os.kill(os.getpid(), 9)
"""

STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(300):
                sender.send(out(np.full(3000, number)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""


@pytest.mark.parametrize("taken", [1, 100])
@pytest.mark.parametrize(("kind", "wait", "name"), [("def", "", "exec"), ("async def", "await", "async_exec")])
def test_a_caller_that_dies_within_a_stream_leaves_nothing(
    tmp_path: Path, kind: str, wait: str, name: str, taken: int
) -> None:
    models = Models(tmp_path)
    models.add("stream", STREAM, DECOUPLED)
    models.add("caller", STREAM_CALLER_DIES.format(kind=kind, wait=wait, name=name))
    with models.served() as server:

        async def run() -> None:
            assert "was lost" in str(await server.numbers("caller", taken))
            await until(lambda: not server.kernel.resolve("stream").in_flight)

        server.run(run)
