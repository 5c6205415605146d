"""Calls with tensors on devices: which models get them there, and which results stay there. The worker is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from backends.transport import wire
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.spec import EnsembleSpec
from kernel.serving.response import Response
from kernel.testing import model_spec
from schedulers.testing import spec_of, step
from shm.lease import RegionNumber
from shm.tensor import RequestedOutput, Span, Tensor
from tests.backends.supervision.call_bench import SMALL, CallBench, calling, submit

if TYPE_CHECKING:
    from kernel.serving.request import Request

ARENA = wire.DeviceArenaCreated(-1, 1 << 21, 0, bytes(64))


class FoundModel:
    """As much of a called model as is looked at."""

    def __init__(self, kind: str, **more: Any) -> None:
        self.config = ModelConfig(instance_group=[ModelInstanceGroup(kind=f"KIND_{kind}")])
        self.spec = msgspec.structs.replace(model_spec(), **more)


def ensemble(**more: Any) -> FoundModel:
    """IN, MORE → `first` → OUT, and MORE → `second` → END."""
    spec = EnsembleSpec(
        (step("first", {"X": "IN", "Y": "MORE"}, {"Z": "OUT"}), step("second", {"X": "MORE"}, {"Z": "END"}))
    )
    model = FoundModel("AUTO")
    model.spec = msgspec.structs.replace(spec_of("other", "IN MORE", "OUT END", ensemble=spec), **more)
    return model


class Found:
    """Finds the model that the test says."""

    def __init__(self, bench: CallBench, model: FoundModel | None) -> None:
        self.model = model
        #: Models of steps, by their names.
        self.steps: dict[str, FoundModel] = {}
        bench.calls.find = lambda name, version, namespace: self.steps.get(name, self.model)  # type: ignore[attr-defined]


def on_device(offset: int = 0, name: str = "IN") -> Tensor:
    return Tensor(name, "UINT8", [8192], None, Span(RegionNumber(-1), offset, 8192))


def place_of(call: Request, name: str = "IN") -> Span:
    (tensor,) = (each for each in call.inputs if each.name == name)
    assert tensor.span is not None
    return tensor.span


def leased(bench: CallBench) -> int:
    """Return how many blocks of the worker's arena on the device are leased."""
    arenas: Any = bench.handle.memory.device_arenas  # type: ignore[union-attr]
    return int(arenas[-1].leased_block_count)


def test_a_model_on_gpus_gets_inputs_there_and_they_are_released_with_the_call() -> None:
    async def scenario(bench: CallBench) -> None:
        Found(bench, FoundModel("GPU"))
        bench.submit()
        await bench.say(ARENA, submit(1, on_device(), on_device=True))
        (call,) = bench.calls.calls
        assert (place_of(call).offset, leased(bench)) == (0, 1)
        (wanted,) = call.outputs
        assert wanted == RequestedOutput("OUT", on_device=True)
        await bench.received()
        call.respond(Response("other", "2", "", [Tensor("OUT", "UINT8", [1], b"x")]))
        assert leased(bench) == 0
        responded, freed = await bench.received()
        assert isinstance(responded, wire.CallResponded)
        assert freed == wire.FreeBlocks([0], -1)

    calling(scenario)


@pytest.mark.parametrize("model", [FoundModel("CPU"), FoundModel("GPU", response_cache=True)], ids=["host", "cache"])
def test_a_call_of_another_model_comes_back_until_a_version_takes_inputs_on_devices(model: FoundModel) -> None:
    async def scenario(bench: CallBench) -> None:
        found = Found(bench, model)
        bench.submit()
        await bench.received()
        await bench.say(ARENA, submit(1, on_device()))
        assert (bench.calls.calls, leased(bench)) == ([], 0)
        assert await bench.received() == [wire.CallOnHost(1), wire.FreeBlocks([0], -1)]
        await bench.say(submit(2, SMALL))
        found.model = FoundModel("GPU")
        await bench.say(submit(3, SMALL))
        assert await bench.received() == [wire.OnDeviceAgain()]
        await bench.say(submit(4, SMALL), submit(5, on_device()))
        assert len(bench.calls.calls) == 4
        bench.calls.calls[-1].release_leases()

    calling(scenario)


def test_all_outputs_of_a_model_may_stay_there_if_the_call_names_none() -> None:
    async def scenario(bench: CallBench) -> None:
        Found(bench, FoundModel("GPU"))
        bench.submit()
        message = submit(1, SMALL, on_device=True)
        message.request.outputs = []
        await bench.say(message)
        (call,) = bench.calls.calls
        assert [(each.name, each.on_device) for each in call.outputs] == [(name, True) for name in model_spec().outputs]

    calling(scenario)


@pytest.mark.parametrize("model", [FoundModel("CPU"), None], ids=["host", "unknown"])
def test_outputs_of_other_models_are_asked_for_as_they_were(model: FoundModel | None) -> None:
    async def scenario(bench: CallBench) -> None:
        Found(bench, model)
        bench.submit()
        await bench.say(submit(1, SMALL, on_device=True))
        (call,) = bench.calls.calls
        assert call.outputs == [RequestedOutput("OUT")]

    calling(scenario)


def test_an_ensemble_gets_an_input_there_that_one_step_on_gpus_reads() -> None:
    async def scenario(bench: CallBench) -> None:
        found = Found(bench, ensemble())
        found.steps = {"first": FoundModel("GPU"), "second": FoundModel("CPU")}
        bench.submit()
        await bench.say(ARENA, submit(1, on_device(), msgspec.structs.replace(SMALL, name="MORE"), on_device=True))
        (call,) = bench.calls.calls
        assert place_of(call, "IN").offset == 0
        assert call.outputs == [RequestedOutput("OUT", on_device=True)]
        call.release_leases()
        assert leased(bench) == 0

    calling(scenario)


@pytest.mark.parametrize("name", ["IN", "MORE"])
def test_a_call_of_an_ensemble_comes_back_until_its_steps_take_all_its_inputs_there(name: str) -> None:
    async def scenario(bench: CallBench) -> None:
        found = Found(bench, ensemble())
        found.steps = {"first": FoundModel("CPU"), "second": FoundModel("GPU")}
        bench.submit()
        await bench.received()
        await bench.say(ARENA, submit(1, on_device(name=name), on_device=True))
        assert (bench.calls.calls, leased(bench)) == ([], 0)
        assert await bench.received() == [wire.CallOnHost(1), wire.FreeBlocks([0], -1)]
        found.steps["first"] = FoundModel("GPU")
        more = msgspec.structs.replace(SMALL, name="MORE")  # two steps read it
        await bench.say(submit(2, SMALL, more), submit(3, SMALL))
        assert await bench.received() == [wire.OnDeviceAgain()]

    calling(scenario)


def test_outputs_of_an_ensemble_without_a_step_on_gpus_are_asked_for_as_they_were() -> None:
    async def scenario(bench: CallBench) -> None:
        found = Found(bench, ensemble())
        found.steps = {"first": FoundModel("CPU"), "second": FoundModel("CPU")}
        bench.submit()
        await bench.say(submit(1, SMALL, on_device=True))
        found.steps["second"] = FoundModel("GPU")
        found.model = ensemble(response_cache=True)
        await bench.say(submit(2, SMALL, on_device=True))
        assert [call.outputs for call in bench.calls.calls] == [[RequestedOutput("OUT")]] * 2

    calling(scenario)
