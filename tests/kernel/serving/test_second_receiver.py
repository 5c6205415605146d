"""A rule that names a second receiver: it gets a copy of the request, and the client never sees what becomes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.serving.catalog import ModelState
from kernel.serving.model import Model
from kernel.serving.prepared import prepare
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.route import ModelRoute, WithSecond, second_copy
from kernel.testing import FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from shm.tensor import ClientSpan, RequestedOutput, Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bench:
    """A model with two versions. The rule sends requests to the first one, and copies of them to the second."""

    def __init__(self) -> None:
        self.lab = FrontDoorLab()
        self.kernel = self.lab.kernel
        self.instances = [FakeInstance("m_1"), FakeInstance("m_2")]
        self.models = [self._add(number, instance) for number, instance in enumerate(self.instances, 1)]
        self.copies: list[Request] = []
        self.kernel.rules.set("m", self)

    def _add(self, version: int, instance: FakeInstance) -> Model:
        model = Model(model_spec("m", dims=(-1,)), ModelConfig(), version, direct, self.lab.clock)
        model.start()
        model.instances.add(instance)
        self.lab.catalog.set_state("m", version, ModelState.READY, "", model)
        return model

    # ---- kernel.serving.route ------------------------------------------------------

    def choose(self, request: Request) -> WithSecond:
        return WithSecond(self.models[0], self)

    def choose_for(self, request: Request, parent: Request) -> Model:
        return self.models[0]

    def receive(self, request: Request, model: Model) -> None:
        assert model is self.models[0]
        assert not request.dispatched, "the version has the request already, and may change its inputs"
        copy = second_copy(request, RecordingSink())
        self.copies.append(copy)
        second = self.models[1]
        self.kernel.submit(copy, route=ModelRoute(second.spec, second))

    # ---- what a client sends -------------------------------------------------------------------

    def send(self, tensor: Tensor, outputs: list[RequestedOutput] | None = None) -> Request:
        request = Request("m", [tensor], RecordingSink(), id="x", outputs=outputs or [], parameters={"p": 1})
        self.kernel.submit(request)
        self.kernel.check()
        return request

    def finish(self, request: Request, version: str) -> Response:
        """Respond as a worker does; returns the only response."""
        request.respond(Response("m", version, request.id, outputs=[]))
        self.kernel.check()
        assert isinstance(request.sink, RecordingSink)
        [response] = request.sink.responses
        return response


@pytest.fixture
def bench() -> Bench:
    return Bench()


def small() -> Tensor:
    return Tensor("IN", "FP32", [1], bytes(4))


def test_two_versions_get_the_request_and_the_client_gets_the_response_of_the_first(bench: Bench) -> None:
    request = bench.send(small())
    [copy] = bench.copies
    assert request in bench.models[0].live.instance_of
    assert copy in bench.models[1].live.instance_of
    assert (copy.id, copy.parameters, copy.batch_size) == ("x", {"p": 1}, request.batch_size)
    assert copy.parameters is not request.parameters
    assert bench.finish(copy, "2").model_version == "2"
    assert not request.finished
    assert bench.finish(request, "1").model_version == "1"
    assert not bench.kernel.in_flight


def test_a_prepared_request_reaches_the_second_receiver_too(bench: Bench) -> None:
    prepared = prepare(Request("m", [small()], RecordingSink()), bench.kernel.route("m"))
    request = prepared.with_inputs([small()], "y", RecordingSink())
    bench.kernel.submit(request, prepared)
    assert [copy.id for copy in bench.copies] == ["y"]
    assert bench.copies[0] in bench.models[1].live.instance_of


def test_a_large_input_is_copied_so_that_a_model_may_change_its_own(bench: Bench) -> None:
    content = bytes(range(256)) * 64
    request = bench.send(Tensor("IN", "FP32", [len(content) // 4], content))
    [copy] = bench.copies
    first, second = request.inputs[0].span, copy.inputs[0].span
    assert first is not None
    assert second is not None
    first.lease.region.view(first.offset, first.byte_size)[:4] = b"gone"
    assert second.lease.region.view(second.offset, second.byte_size).tobytes() == content
    for each in (request, copy):
        bench.finish(each, "1")
    assert [model.input_arena and model.input_arena.allocator.block_count for model in bench.models] == [0, 0]


@pytest.fixture
def region(bench: Bench) -> Iterator[str]:
    path = Path("/dev/shm", f"naiad-test-second-{os.getpid()}")
    path.write_bytes(bytes(64))
    bench.lab.regions.register_system("r", f"/{path.name}", 0, 64)
    path.unlink()
    yield "r"
    bench.lab.regions.close()


def test_a_region_of_a_client_is_shared_for_inputs_and_never_written_by_the_second(bench: Bench, region: str) -> None:
    tensor = Tensor("IN", "FP32", [4], client_span=ClientSpan(region, 16))
    request = bench.send(tensor, [RequestedOutput("OUT", client_span=ClientSpan(region, 16, 16))])
    [copy] = bench.copies
    [registered] = bench.lab.regions.all()
    assert registered.lease_count == 3
    assert copy.outputs[0].span is None
    assert copy.outputs[0].client_span is None
    bench.finish(request, "1")
    assert registered.lease_count == 1, "the second still reads the input"
    bench.finish(copy, "2")
    assert registered.lease_count == 0


def test_a_request_that_is_refused_has_no_second_receiver(bench: Bench) -> None:
    wrong = bench.send(Tensor("OTHER", "FP32", [1], bytes(4)))
    bench.kernel.stopping = True
    late = bench.send(small())
    assert wrong.failed
    assert late.failed
    assert not bench.copies
