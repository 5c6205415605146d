"""Which requests are recorded, and what is passed on of them and of their responses.

Which requests are recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import SequenceBatching
from kernel.errors import ErrorCode, InternalError, InvalidArgument
from kernel.records import recorder
from kernel.records.front_doors import HTTP, Reception
from kernel.records.record_settings import RecordSettings
from kernel.records.record_task import TOO_LARGE, PassedRequest, PassedResponse, PassedTensor
from kernel.records.recorder import Recorder, RecordSampler
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.arena import Arena
from shm.tensor import ClientSpan, RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shm.arena import Block

_decode = msgspec.msgpack.Decoder(PassedRequest | PassedResponse).decode


class Door(RecordingSink):
    def reception(self) -> Reception:
        return HTTP, 3, 4, None


class Output:
    """Keeps what the recorder passes on, as the helper gets it."""

    def __init__(self) -> None:
        self.passed: list[PassedRequest | PassedResponse] = []
        self.sources: list[bytes] = []
        self.full = False

    def put(self, message: tuple[Any, ...], sources: Sequence[Tensor] = ()) -> bool:
        if not self.full:
            self.passed.append(_decode(msgspec.msgpack.encode(message)))
        for source in sources:
            self.sources.append(bytes(source.raw()))
            source.release()
        return not self.full


class Bench:
    def __init__(self, arena: Arena, settings: RecordSettings) -> None:
        self.arena = arena
        self.clock = FakeClock()
        self.output = Output()
        self.recorder = Recorder(settings, self.output, now_ns=self.clock.now_ns, memory=self._memory)
        self.model = Model(model_spec("m", dims=(-1,)), ModelConfig(), 3, direct, self.clock)

    def _memory(self, byte_size: int) -> Block:
        block = self.arena.take(byte_size)
        assert block is not None
        return block

    def large(self, name: str, data: bytes) -> Tensor:
        block = self._memory(len(data))
        block.view()[: len(data)] = data
        return Tensor(name, "UINT8", [len(data)], None, block.span)

    def begin(self, *inputs: Tensor, **more: Any) -> Request:
        request = Request("m", list(inputs), more.pop("sink", None) or Door(), id="r", received_ns=5, **more)
        self.recorder.begin(request, self.model)
        return request

    @property
    def numbers(self) -> list[tuple[str, int]]:
        return [("request" if isinstance(each, PassedRequest) else "response", each.number)
                for each in self.output.passed]  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena("a", 32 << 20) as made:
        yield made
        assert not made.allocator.used_bytes


@pytest.fixture
def bench(arena: Arena) -> Bench:
    return Bench(arena, RecordSettings(Path("/r")))


def small(data: bytes = b"abc") -> Tensor:
    return Tensor("IN", "UINT8", [len(data)], data)


def test_a_request_and_its_response_are_passed_on_with_their_tensors(bench: Bench) -> None:
    more = {"model_version": "3", "outputs": [RequestedOutput("OUT", 2)], "parameters": {"p": 1}, "priority": 4}
    request = bench.begin(small(), **more)
    request.queue_start_ns = 6
    request.respond(Response("m", "3", "r", [small(b"xyz")], {"q": True}))
    asked, answered = bench.output.passed
    assert isinstance(asked, PassedRequest)
    assert (asked.number, asked.at_ns, asked.model, asked.version, asked.id) == (1, 5, "m", 3, "r")
    assert (asked.wanted_version, asked.parameters, asked.priority, asked.protocol) == ("3", {"p": 1}, 4, "http")
    assert asked.inputs == [PassedTensor("IN", "UINT8", [3], b"abc")]
    assert [(each.name, each.classification) for each in asked.outputs] == [("OUT", 2)]
    assert answered == PassedResponse(
        1, bench.clock.now_ns(), True, "3", [PassedTensor("IN", "UINT8", [3], b"xyz")], {"q": True}, "", "", 6
    )


def test_large_inputs_are_copied_and_large_outputs_are_leased(bench: Bench) -> None:
    data = b"a" * 5000
    given = bench.large("IN", data)
    request = bench.begin(given, small(), leased=True)
    assert bench.output.sources == [data]
    given.release()
    response = Response("m", "3", "r", [small(), bench.large("OUT", b"b" * 6000)], leased=True)
    request.respond(response)
    response.release()
    assert bench.output.sources == [data, b"b" * 6000]
    asked, answered = bench.output.passed
    assert isinstance(asked, PassedRequest)
    assert isinstance(answered, PassedResponse)
    assert [(each.name, each.source, each.data) for each in asked.inputs] == [("IN", 0, None), ("IN", None, b"abc")]
    assert [each.source for each in answered.outputs or ()] == [None, 0]


def test_inputs_above_the_limit_are_not_copied(arena: Arena) -> None:
    bench = Bench(arena, RecordSettings(Path("/r"), tensor_limit=5000))
    given = bench.large("IN", bytes(5001))
    bench.begin(given, leased=True)
    given.release()
    (asked,) = bench.output.passed
    assert isinstance(asked, PassedRequest)
    assert (asked.inputs[0].missing, asked.inputs[0].byte_size, bench.output.sources) == (TOO_LARGE, 5001, [])


def test_regions_of_clients_are_named_and_not_read(bench: Bench) -> None:
    given = Tensor("IN", "UINT8", [4], None, None, ClientSpan("r", 4, 8))
    wanted = RequestedOutput("OUT", 0, None, ClientSpan("r", 4, 16))
    bench.begin(given, outputs=[wanted], leased=True)
    (asked,) = bench.output.passed
    assert isinstance(asked, PassedRequest)
    assert (asked.inputs[0].region, asked.outputs[0].region) == (ClientSpan("r", 4, 8), ClientSpan("r", 4, 16))


def test_requests_of_ensembles_and_models_are_not_recorded(bench: Bench) -> None:
    parent = bench.begin(small())
    child = bench.begin(small(), parent=parent)
    assert bench.numbers == [("request", 1)]
    assert isinstance(child.sink, Door)


def test_a_request_that_did_not_come_over_a_protocol_has_none(bench: Bench) -> None:
    bench.begin(small(), sink=RecordingSink())
    (asked,) = bench.output.passed
    assert isinstance(asked, PassedRequest)
    assert asked.protocol == ""


def test_a_refused_request_is_recorded_with_its_error(bench: Bench) -> None:
    bench.recorder.refused(Request("m", [small()], Door()), bench.model, InvalidArgument("wrong shape"))
    answered = bench.output.passed[1]
    assert isinstance(answered, PassedResponse)
    assert (answered.number, answered.error, answered.code) == (1, "wrong shape", ErrorCode.INVALID_ARG.value)


def test_a_request_without_room_passes_unseen_and_a_stream_is_recorded_until_there_is_no_room(bench: Bench) -> None:
    bench.output.full = True
    assert isinstance(bench.begin(small()).sink, Door)
    bench.output.full = False
    door = Door()
    request = bench.begin(small(), sink=door)
    request.respond(Response("m", "3", "r", [small()], final=False))
    bench.output.full = True
    request.respond(Response("m", "3", "r", [small()], final=False))
    bench.output.full = False
    request.fail(InternalError("later"))
    assert bench.numbers == [("request", 2), ("response", 2)]
    assert len(door.responses) == 3


def test_requests_of_a_sequence_that_began_before_the_recorder_are_not_recorded(bench: Bench) -> None:
    spec = model_spec("m", dims=(-1,), sequence_batching=SequenceBatching())
    bench.model = Model(spec, ModelConfig(), 3, direct, bench.clock)
    bench.begin(small(), correlation_id=4)
    bench.begin(small(), correlation_id=5, sequence_start=True)
    bench.begin(small(), correlation_id=5, sequence_end=True)
    assert bench.numbers == [("request", 1), ("request", 2)]


def test_one_of_several_requests_is_recorded(arena: Arena) -> None:
    bench = Bench(arena, RecordSettings(Path("/r"), rate=3))
    for _ in range(7):
        bench.begin(small())
    assert bench.numbers == [("request", 1), ("request", 2), ("request", 3)]


def test_one_request_of_n_is_recorded_beginning_with_the_first() -> None:
    sampler = RecordSampler(3, {})
    assert [sampler.is_recorded("m") for _ in range(7)] == [True, False, False, True, False, False, True]


def test_rates_of_one_and_zero_record_all_and_none() -> None:
    sampler = RecordSampler(1, {"never": 0})
    assert [sampler.is_recorded(name) for name in ("m", "never", "m")] == [True, False, True]


def test_a_model_with_a_rate_of_its_own_is_counted_alone() -> None:
    sampler = RecordSampler(0, {"m": 2})
    assert [sampler.is_recorded(name) for name in ("m", "other", "m", "m")] == [True, False, False, True]


def test_all_requests_of_a_sequence_are_recorded_or_none() -> None:
    sampler = RecordSampler(2, {})
    seen = [
        sampler.is_recorded_of_sequence("m", id, start=start, end=end)
        for id, start, end in (
            (1, True, False), (2, True, False), (1, False, False), (2, False, False), (1, False, True),
            (1, False, False), (3, True, True), (3, False, False),
        )
    ]  # fmt: skip
    assert seen == [True, False, True, False, True, False, True, False]


def test_a_sequence_that_began_before_the_recorder_is_not_recorded() -> None:
    assert not RecordSampler(1, {}).is_recorded_of_sequence("m", 5, start=False, end=False)


def test_a_sequence_that_never_ends_is_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_SEQUENCES", 2)
    sampler = RecordSampler(1, {})
    for id in (1, 2, 3):
        assert sampler.is_recorded_of_sequence("m", id, start=True, end=False)
    seen = [sampler.is_recorded_of_sequence("m", id, start=False, end=False) for id in (1, 2, 3)]
    assert seen == [False, True, True]
