"""Calls with tensors on devices: which models get them there, and which results stay there. The worker is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from backends.transport import wire
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.serving.response import Response
from kernel.testing import model_spec
from shm.lease import RegionNumber
from shm.tensor import RequestedOutput, Span, Tensor
from tests.backends.supervision.calls.test_caller import SMALL, CallBench, calling, submit

if TYPE_CHECKING:
    from kernel.serving.request import Request

ARENA = wire.DeviceArenaCreated(-1, 1 << 21, 0, bytes(64))


class FoundModel:
    """As much of a called model as is looked at."""

    def __init__(self, kind: str, **more: Any) -> None:
        self.config = ModelConfig(instance_group=[ModelInstanceGroup(kind=f"KIND_{kind}")])
        self.spec = msgspec.structs.replace(model_spec(), **more)


class Found:
    """Finds the model that the test says."""

    def __init__(self, bench: CallBench, model: FoundModel | None) -> None:
        self.model = model
        bench.calls.find = lambda name, version: self.model  # type: ignore[attr-defined]


def on_device(offset: int = 0) -> Tensor:
    return Tensor("IN", "UINT8", [8192], None, Span(RegionNumber(-1), offset, 8192))


def place_of(call: Request) -> Span:
    (tensor,) = call.inputs
    assert tensor.span is not None
    return tensor.span


def leased(bench: CallBench) -> int:
    """Return how many blocks of the worker's arena on the device are leased."""
    arenas: Any = bench.handle._memory.device_arenas  # type: ignore[union-attr]
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
