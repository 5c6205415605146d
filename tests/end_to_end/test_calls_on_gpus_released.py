"""When the memory of tensors on GPUs is given back that calls between models have used. See `test_calls_on_gpus.py`."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from tests.end_to_end.calling_models import until, value_of
from tests.end_to_end.gpu_models import LARGE, ON_DEVICE, THEN, GpuModels, gpu_models, worker_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuModels:
    return gpu_models(tmp_path, monkeypatch)


#: Keeps the results of its calls until it is asked for something small.
KEEPER = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            if tensor.shape() == [1]:
                self.kept.clear()
            else:
                response = call("plus", renamed(tensor)).exec()
                (tensor,) = response.output_tensors()
                self.kept.append(tensor)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]))
        return found
"""


def test_a_result_that_the_model_keeps_stays_leased_until_it_is_dropped(models: GpuModels) -> None:
    models.on_gpu("caller", KEEPER)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            for _ in range(3):
                await server.ask("caller", LARGE)
            await until(lambda: server.memory() == {"plus_0_0 blocks on a GPU": 3, "caller_0_0 results": 3})
            await server.ask("caller", LARGE[:1])
            await server.settle()

        server.run(run)


#: Waits for the file `go` in its folder before it responds.
WAITS = """
import pathlib


class TritonPythonModel:
    def initialize(self, args):
        self.go = pathlib.Path(args["model_repository"]) / "go"

    def execute(self, requests):
        (self.go.parent / "begun").touch()
        while not self.go.exists() and not requests[0].is_cancelled():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", given(r))]) for r in requests]
"""


@pytest.mark.parametrize("killed", ["caller", "called"])
def test_all_is_released_when_the_caller_or_the_called_worker_is_killed(models: GpuModels, killed: str) -> None:
    models.on_gpu("caller", THEN % ("", ON_DEVICE))
    models.plus()
    models.on_gpu("called", WAITS)
    go, begun = models.path / "called" / "go", models.path / "called" / "begun"
    with models.served() as server:

        async def run() -> None:
            _, sink = server.submit("caller", LARGE)
            await until(begun.exists)
            assert server.memory()["caller_0_0 blocks on a GPU"] == 1
            os.kill(worker_of(server, killed), signal.SIGKILL)
            await sink.final
            error = sink.responses[-1].error
            assert error is not None
            assert f"the worker of model instance '{killed}_0_0' was lost" in error.message
            go.touch()
            await server.settle()
            await until(lambda: server.kernel.model_ready(killed))
            assert np.array_equal(await server.ask("caller", LARGE), LARGE + 1)

        server.run(run)


def test_all_is_released_when_the_request_is_cancelled(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % ("", ON_DEVICE))
    models.plus()
    models.on_gpu("called", WAITS)
    with models.served() as server:

        async def run() -> None:
            request, sink = server.submit("caller", LARGE)
            await until((models.path / "called" / "begun").exists)
            request.cancel()
            await sink.final
            for response in sink.responses:
                response.release()
            await server.settle()

        server.run(run)


def test_a_queued_call_whose_input_has_gone_with_its_worker_harms_no_other(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % ("", ON_DEVICE))
    models.plus()
    models.on_gpu("called", WAITS)
    models.on_gpu("other", THEN % ("", ON_DEVICE))
    with models.served() as server:

        async def run() -> None:
            _, first = server.submit("other", LARGE)
            await until((models.path / "called" / "begun").exists)
            _, second = server.submit("caller", LARGE)
            called = server.kernel.catalog.resolve("called")
            await until(lambda: called.in_flight == 2)
            os.kill(worker_of(server, "caller"), signal.SIGKILL)
            await second.final
            assert second.responses[-1].error is not None
            (models.path / "called" / "go").touch()
            await first.final
            assert np.array_equal(value_of(first.responses[-1]), LARGE + 1)

        server.run(run)


#: Gives its input back, and keeps it until it is asked for something small.
KEEPS_INPUT = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            self.kept = [] if tensor.shape() == [1] else [*self.kept, tensor]
            found.append(out(np.zeros(1)))
        return found
"""

CALLS = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            first = call("plus", renamed(given(request))).exec()
            response = call("called", renamed(first.output_tensors()[0])).exec()
            assert not response.has_error(), response.error().message()
            found.append(pb_utils.InferenceResponse(response.output_tensors()))
        return found
"""


def test_an_input_on_the_gpu_that_the_model_keeps_stays_leased_until_it_is_dropped(models: GpuModels) -> None:
    models.on_gpu("caller", CALLS)
    models.plus()
    models.on_gpu("called", KEEPS_INPUT)
    with models.served() as server:

        async def run() -> None:
            for _ in range(3):
                await server.ask("caller", LARGE)
            await until(lambda: server.memory() == {"caller_0_0 blocks on a GPU": 3})
            await server.ask("called", LARGE[:1])
            await server.settle()

        server.run(run)


def test_a_worker_that_is_unloaded_stays_until_its_results_are_dropped(models: GpuModels) -> None:
    models.on_gpu("caller", KEEPER)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            await server.ask("caller", LARGE)
            pid = worker_of(server, "plus")
            await server.kernel.repository.unload("plus")
            assert psutil.pid_exists(pid)
            await server.ask("caller", LARGE[:1])
            await until(lambda: not psutil.pid_exists(pid))

        server.run(run)
