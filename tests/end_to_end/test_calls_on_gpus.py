"""Calls between models on GPUs, over a CUDA of POSIX shared memory (`tests/fake_cuda`): no GPU is needed.

The streams of the fake do nothing before they are waited for, so that a missing wait gives old bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import ServerProcess
from tests.end_to_end.calling_models import DECOUPLED, HEAD, until
from tests.end_to_end.gpu_clients import PLUS_ONE, PYTHON_CONFIG, Client, Regions, rows
from tests.end_to_end.gpu_clients import copies as copied
from tests.end_to_end.gpu_models import (
    CONFIG,
    LARGE,
    ON_CPU,
    ON_DEVICE,
    ON_GPU,
    ON_HOST,
    RENAMED,
    THEN,
    GpuModels,
    copies,
    gpu_models,
)

if TYPE_CHECKING:
    from pathlib import Path

#: Calls `plus` twice, which adds 1 each time. What it gets is on its GPU, small or large.
CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            for number in range(2):
                response = call("plus", renamed(tensor)).exec()
                assert not response.has_error(), response.error().message()
                (tensor,) = response.output_tensors()
                assert not tensor.is_cpu(), number
                assert tensor.__dlpack_device__() == (2, DEVICE)
            found.append(pb_utils.InferenceResponse([tensor]))
        return found
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuModels:
    return gpu_models(tmp_path, monkeypatch)


def test_results_and_inputs_of_calls_stay_on_the_gpu(models: GpuModels) -> None:
    models.on_gpu("caller", CALLER)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3], LARGE * 2):
                found = await server.ask("caller", values)
                assert np.array_equal(found, values + 2)
            # The first input comes from the host, the last output goes there.
            assert copies(server, "plus") == 3
            assert copies(server, "caller") == 3

        server.run(run)


DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            assert given(request).is_cpu()
            found.append(out(given(request).as_numpy() * 2))
        return found
"""


def test_a_model_without_a_gpu_gets_inputs_on_the_host(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % ("", ON_HOST))
    models.plus()
    models.write("called", CONFIG % "python" + ON_CPU, "1/model.py", HEAD + DOUBLE)
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                assert np.array_equal(await server.ask("caller", values), (values + 1) * 2)
            (instance,) = server.kernel.catalog.resolve("caller").instances.serving
            calls = instance.worker_calls  # type: ignore[attr-defined]
            assert calls.refused == {"called"}
            # The first call came back; the second one went to the host at once.
            assert calls.last_call == 5

        server.run(run)


def test_a_model_on_a_gpu_that_wants_inputs_on_the_host_gets_them_there(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % ("", ON_HOST))
    models.plus()
    config = (CONFIG % "python" + ON_GPU % 0).replace('"no"', '"yes"')
    models.write("called", config, "1/model.py", HEAD + DOUBLE)
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                assert np.array_equal(await server.ask("caller", values), (values + 1) * 2)
            assert copies(server, "called") == 2 + 1  # its inputs, and the large output to its place

        server.run(run)


def preferred(kind: str, device: int = 0) -> str:
    return f", preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_{kind}, {device})"


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        ("", ON_DEVICE),
        (preferred("CPU"), ON_HOST),
        (preferred("GPU"), ON_DEVICE),
        (preferred("GPU", 1), ON_DEVICE),  # nothing is made there: the result stays where it is
    ],
    ids=["any", "host", "GPU 0", "GPU 1"],
)
def test_results_of_a_model_on_a_gpu_are_where_the_caller_prefers_them(
    models: GpuModels, wanted: str, where: str
) -> None:
    models.on_gpu("caller", THEN % (wanted, where))
    models.plus()
    models.plus(name="called")
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                assert np.array_equal(await server.ask("caller", values), values + 2)

        server.run(run)


@pytest.mark.parametrize(
    ("wanted", "where"), [("", ON_HOST), (preferred("GPU"), ON_DEVICE), (preferred("GPU", 1), ON_HOST)]
)
def test_results_of_a_model_on_the_host_come_to_the_gpu_of_the_caller_if_it_prefers_that(
    models: GpuModels, wanted: str, where: str
) -> None:
    models.on_gpu("caller", THEN % (wanted, where))
    models.plus()
    models.write("called", CONFIG % "python" + ON_CPU, "1/model.py", HEAD + DOUBLE)
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                assert np.array_equal(await server.ask("caller", values), (values + 1) * 2)

        server.run(run)


def test_a_gpu_that_is_not_there_cannot_be_preferred(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % (preferred("GPU", 7), ON_DEVICE))
    models.plus()
    models.plus(name="called")
    with models.served() as server:

        async def run() -> None:
            text = "preferred memory is on GPU 7, and the server has 2"
            assert text in str(await server.ask("caller", LARGE))

        server.run(run)


@pytest.mark.parametrize(("wanted", "where"), [("", "False, (2, 1)"), (preferred("GPU"), ON_DEVICE)])
def test_tensors_go_to_and_from_another_gpu(models: GpuModels, wanted: str, where: str) -> None:
    models.on_gpu("caller", THEN % (wanted, where))
    models.plus()
    models.plus(ON_GPU % 1, name="called")
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                assert np.array_equal(await server.ask("caller", values), values + 2)

        server.run(run)


def test_without_room_in_the_pool_tensors_go_through_the_host(models: GpuModels) -> None:
    models.on_gpu("caller", CALLER.replace("assert not tensor.is_cpu(), number", "continue"))
    models.plus()
    with models.served(cuda_memory_pool_byte_size="0:1000000") as server:

        async def run() -> None:
            assert np.array_equal(await server.ask("caller", LARGE), LARGE + 2)
            assert copies(server, "plus") == 4

        server.run(run)


#: Calls its own model with a tensor on the GPU, and `plus` at the end.
ITSELF = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            if tensor.is_cpu():
                (tensor,) = call("plus", renamed(tensor)).exec().output_tensors()
                response = call("caller", renamed(tensor)).exec()
            else:
                response = call("plus", renamed(tensor)).exec()
            assert not response.has_error(), response.error().message()
            found.append(pb_utils.InferenceResponse(response.output_tensors()))
        return found
"""


def test_a_model_calls_itself_on_the_gpu(models: GpuModels) -> None:
    models.on_gpu("caller", ITSELF, config="")
    group = models.path / "caller" / "config.pbtxt"
    group.write_text(group.read_text().replace("kind: KIND_GPU", "count: 2 kind: KIND_GPU"))
    models.plus()
    with models.served() as server:

        async def run() -> None:
            assert np.array_equal(await server.ask("caller", LARGE), LARGE + 2)

        server.run(run)


STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            (tensor,) = call("plus", renamed(given(request))).exec().output_tensors()
            for number in range(100):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", tensor)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ADDS = """
class TritonPythonModel:
    async def execute(self, requests):
        found = []
        for request in requests:
            total = 0
            async for response in await call("stream", renamed(given(request))).async_exec(decoupled=True):
                for tensor in response.output_tensors():
                    assert not tensor.is_cpu()
                    again = await call("plus", renamed(tensor)).async_exec()
                    total += 1
            found.append(pb_utils.InferenceResponse(again.output_tensors()))
            assert total == 100
        return found
"""


def test_responses_of_a_stream_stay_on_the_gpu(models: GpuModels) -> None:
    models.on_gpu("caller", ADDS)
    models.on_gpu("stream", STREAM, config=DECOUPLED)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            assert np.array_equal(await server.ask("caller", LARGE), LARGE + 2)

        server.run(run)


def test_memory_that_is_kept_on_a_gpu_is_in_the_statistics(models: GpuModels) -> None:
    models.on_gpu("caller", CALLER)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            await server.ask("caller", LARGE)
            memory = server.kernel.catalog.resolve("plus").statistics.memory
            expected = [("GPU", (2 << 20) + (128 << 10))]  # an arena, and the block of gathered inputs
            await until(lambda: [(use.type, use.byte_size) for use in memory.total()] == expected)

        server.run(run)


def test_calls_on_a_gpu_copy_nothing_between_regions_of_a_client(models: GpuModels, regions: Any) -> None:
    config = PYTHON_CONFIG % "no"
    models.write("caller", config, "1/model.py", "DEVICE = 0\n" + HEAD + RENAMED + CALLER)
    models.write("plus", f'backend: "plus"\n{config}', "backend.py", PLUS_ONE)
    with ServerProcess(models.path) as server:
        client = Regions(server, regions)
        for start in (0, 5):
            values = rows(1, start)
            assert client.infer("caller", values).tolist() == (values + 2).tolist()
        assert copied(server, "caller") == copied(server, "plus") == 0


#: Gives its input back.
PASSES = """
class TritonPythonModel:
    def execute(self, requests):
        assert not any(given(request).is_cpu() for request in requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", given(r))]) for r in requests]
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [
  { model_name: "plus" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "first" } },
  { model_name: "second" model_version: -1 input_map { key: "IN" value: "first" }
    output_map { key: "OUT" value: "second" } },
  { model_name: "plus" model_version: -1 input_map { key: "IN" value: "second" }
    output_map { key: "OUT" value: "OUT" } }
] }
"""


def batched(group: str) -> str:
    return PYTHON_CONFIG.replace("max_batch_size: 0", "max_batch_size: 8").replace("[-1, -1]", "[-1]") % "no" + group


@pytest.mark.parametrize("second", ["plus", "python"])
def test_outputs_of_steps_on_gpus_stay_there_for_the_next_step(models: GpuModels, regions: Any, second: str) -> None:
    models.write("plus", f'backend: "plus"\n{batched("")}', "backend.py", PLUS_ONE)
    if second == "plus":
        models.write("second", f'backend: "plus"\n{batched("")}', "backend.py", PLUS_ONE)
    else:
        models.write("second", batched(""), "1/model.py", HEAD + PASSES)
    models.write("ensemble", ENSEMBLE, "labels", "")
    added = 3 if second == "plus" else 2
    with ServerProcess(models.path) as server:
        client = Regions(server, regions)
        for start in (0, 5):
            values = rows(1, start)
            assert client.infer("ensemble", values).tolist() == (values + added).tolist()
        assert copied(server, "plus") == copied(server, "second") == 0
        assert Client(server, "ensemble").infer(rows(1)).tolist() == (rows(1) + added).tolist()
        assert copied(server, "plus") == 2  # the input from the host, the output to it


def test_calls_of_an_ensemble_copy_nothing_between_regions_of_a_client(models: GpuModels, regions: Any) -> None:
    config = PYTHON_CONFIG % "no"
    source = CALLER.replace('"plus"', '"ensemble"')
    models.write("caller", config, "1/model.py", "DEVICE = 0\n" + HEAD + RENAMED + source)
    models.write("plus", f'backend: "plus"\n{config}', "backend.py", PLUS_ONE)
    models.write("second", config, "1/model.py", HEAD + PASSES)
    models.write("ensemble", chain(), "labels", "")
    with ServerProcess(models.path) as server:
        client = Regions(server, regions)
        for start in (0, 5):
            values = rows(1, start)
            assert client.infer("caller", values).tolist() == (values + 4).tolist()
        for model in ("caller", "plus", "second"):
            assert copied(server, model) == 0, model


def chain(first: str = "plus", last: str = "plus") -> str:
    """Return the configuration of an ensemble without batches."""
    text = ENSEMBLE.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [-1]", "dims: [-1, -1]")
    before, between, after = text.split('"plus"')
    return f'{before}"{first}"{between}"{last}"{after}'


def flat(first: str = "plus", last: str = "plus") -> str:
    return chain(first, last).replace("dims: [-1, -1]", "dims: [-1]")


@pytest.mark.parametrize(("first", "last", "where"), [("host", "plus", ON_DEVICE), ("plus", "host", ON_HOST)])
def test_tensors_of_an_ensemble_go_through_the_host_where_its_step_is_there(
    models: GpuModels, first: str, last: str, where: str
) -> None:
    models.on_gpu("caller", THEN % ("", where))
    models.plus()
    models.plus(name="second")
    models.write("host", CONFIG % "python" + ON_CPU, "1/model.py", HEAD + DOUBLE)
    models.write("called", flat(first, last), "labels", "")
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3]):
                expected = (values + 1) * 2 + 2 if first == "host" else (values + 3) * 2
                assert np.array_equal(await server.ask("caller", values), expected)
            (instance,) = server.kernel.catalog.resolve("caller").instances.serving
            calls = instance.worker_calls  # type: ignore[attr-defined]
            assert calls.refused == ({"called"} if first == "host" else set())

        server.run(run)


def test_tensors_of_nested_ensembles_stay_on_the_gpu(models: GpuModels) -> None:
    models.on_gpu("caller", THEN % ("", ON_DEVICE))
    models.plus()
    models.on_gpu("second", PASSES)
    models.write("called", flat("inner", "inner"), "labels", "")
    models.write("inner", flat(), "labels", "")
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3], LARGE * 2):
                assert np.array_equal(await server.ask("caller", values), values + 5)
            # Of the first call, whose input comes from the host; the last output goes there.
            assert (copies(server, "plus"), copies(server, "second"), copies(server, "caller")) == (3, 0, 3)

        server.run(run)
