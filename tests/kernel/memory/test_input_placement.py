"""Where inputs lie when a worker reads them: in the message, in the model's arena, or where they were already.

The errors of requests without memory: whether to try again, and what the log says.
"""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import ArenaFull, RegionNotFound
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import ALIGNMENT, InputPlacer, MemoryRefusals
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.arena import INLINE_LIMIT
from shm.blocks import ByteBudget
from shm.region import RegionKind
from shm.tensor import ClientSpan, RequestedOutput, Tensor
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.tensor import Buffer

CAPACITY = 1 << 18

LARGE = INLINE_LIMIT + 8


class Bench:
    """A model with an arena of `CAPACITY` bytes, and a client's region `r` of 64 bytes."""

    def __init__(self) -> None:
        self.regions = RegionRegistry()
        self.budget = ByteBudget(4 * CAPACITY)
        self.placer = InputPlacer(self.regions, CAPACITY, self.budget)
        self.model = self.new_model()
        path = Path("/dev/shm", f"naiad_test_{uuid.uuid4().hex}")
        path.write_bytes(bytes(64))
        try:
            self.regions.register_system("r", f"/{path.name}", 0, 64)
        finally:
            path.unlink()

    def new_model(self) -> Model:
        return Model(model_spec("m", dims=(-1,)), ModelConfig(), 1, direct, FakeClock())

    @property
    def block_count(self) -> int:
        return 0 if self.model.input_arena is None else self.model.input_arena.allocator.block_count

    @property
    def leases_of_client(self) -> int:
        [region] = self.regions.status(RegionKind.SYSTEM)
        return region.lease_count

    def close(self) -> None:
        self.regions.close()
        if self.model.input_arena is not None:
            self.model.input_arena.close()
            assert self.model.input_arena.region.closed, "every lease of a test is released"
        assert self.budget.used_byte_size == 0


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def request(*inputs: Tensor, outputs: tuple[RequestedOutput, ...] = ()) -> Request:
    return Request("m", list(inputs), RecordingSink(), outputs=list(outputs))


def tensor(data: Buffer, datatype: str = "UINT8") -> Tensor:
    return Tensor("IN", datatype, [len(data)], data)


# ---- regions of clients, and outputs of other models ----------------------------------------


def test_what_a_client_names_is_leased(bench: Bench) -> None:
    named = ClientSpan("r", 16, 8)
    asked = request(
        Tensor("A", "FP32", [4], client_span=named),
        tensor(b"x"),
        outputs=(RequestedOutput("B", client_span=named), RequestedOutput("C")),
    )
    bench.placer.lease(asked)
    assert asked.leased
    assert bench.leases_of_client == 2
    for each in (asked.inputs[0], asked.outputs[0]):
        assert each.client_span is None
        assert each.region_of_client == named
    bench.placer.place_large(asked, bench.model, None)
    assert asked.inputs[0].data is None
    asked.release_leases()
    assert bench.leases_of_client == 0


def test_leases_that_were_taken_before_one_failed_are_the_callers_to_release(bench: Bench) -> None:
    asked = request(
        Tensor("A", "FP32", [4], client_span=ClientSpan("r", 16)),
        Tensor("B", "FP32", [4], client_span=ClientSpan("s", 16)),
    )
    with pytest.raises(RegionNotFound):
        bench.placer.lease(asked)
    asked.release_leases()
    assert bench.leases_of_client == 0


def test_an_output_of_another_model_stays_where_it_is(bench: Bench) -> None:
    released: list[str] = []
    asked = request(leased_tensor("IN", "UINT8", [LARGE], b"x" * LARGE, lambda: released.append("it")))
    span = asked.inputs[0].span
    bench.placer.lease(asked)
    bench.placer.place_large(asked, bench.model, None)
    assert asked.inputs[0].span is span
    assert asked.leased
    assert bench.block_count == 0
    asked.release_leases()
    assert released == ["it"]


# ---- the model's arena ----------------------------------------------------------------------


def test_small_inputs_travel_in_the_message_and_large_ones_in_the_arena(bench: Bench) -> None:
    small, large = b"x" * INLINE_LIMIT, b"y" * LARGE
    asked = request(tensor(small), tensor(large), tensor(memoryview(large)))
    bench.placer.place_large(asked, bench.model, None)
    assert asked.inputs[0].data is small
    assert asked.leased
    for each in asked.inputs[1:]:
        assert each.data is None, "the received message can be freed"
        assert bytes(each.raw()) == large
    assert bench.block_count == 2
    asked.release_leases()
    assert bench.block_count == 0


def test_a_request_with_small_inputs_has_no_leases_and_needs_no_arena(bench: Bench) -> None:
    asked = request(tensor(b"x"))
    bench.placer.lease(asked)
    bench.placer.place_large(asked, bench.model, None)
    assert not asked.leased
    assert bench.model.input_arena is None


def test_an_input_that_finds_no_room_fails_the_request(bench: Bench) -> None:
    asked = request(tensor(bytes(CAPACITY // 2)), tensor(bytes(CAPACITY)))
    with pytest.raises(ArenaFull):
        bench.placer.place_large(asked, bench.model, None)
    asked.release_leases()
    assert bench.block_count == 0


# ---- buffers to receive in ------------------------------------------------------------------


def test_inputs_are_used_where_they_were_received(bench: Bench) -> None:
    buffer = bench.placer.receive_buffer(bench.model, 100 + 2 * LARGE, 100)
    assert buffer is not None
    first, second = buffer.view[100 : 100 + LARGE], buffer.view[100 + LARGE :]
    first[:], second[:] = b"x" * LARGE, b"y" * LARGE
    asked = request(tensor(first, "FP32"), tensor(second))
    bench.placer.place_large(asked, bench.model, buffer)
    del first, second
    assert bench.block_count == 1
    spans = [each.span for each in asked.inputs if each.span is not None]
    assert spans[0].offset % ALIGNMENT == 0, "frameworks like tensors that are aligned"
    assert spans[1].offset == spans[0].offset + LARGE
    assert [bytes(each.raw()[:1]) for each in asked.inputs] == [b"x", b"y"]
    buffer.release()
    spans[0].lease.release()
    assert bench.block_count == 1
    spans[1].lease.release()
    assert bench.block_count == 0


def test_small_inputs_leave_the_buffer(bench: Bench) -> None:
    buffer = bench.placer.receive_buffer(bench.model, 8, 0)
    assert buffer is not None
    buffer.view[:] = b"01234567"
    asked = request(tensor(buffer.view[2:6]))
    bench.placer.place_large(asked, bench.model, buffer)
    buffer.view[:] = bytes(8)
    buffer.release()
    assert asked.inputs[0].data == b"2345"
    assert not asked.leased


def test_an_input_that_a_worker_could_not_use_in_place_is_copied(bench: Bench) -> None:
    buffer = bench.placer.receive_buffer(bench.model, 2 + LARGE, 0)
    assert buffer is not None
    buffer.view[2:] = b"x" * LARGE
    asked = request(tensor(buffer.view[2:], "FP32"), tensor(b"y" * LARGE))
    bench.placer.place_large(asked, bench.model, buffer)
    buffer.release()
    assert bench.block_count == 2, "one for each, and none for the message"
    assert [bytes(each.raw()) for each in asked.inputs] == [b"x" * LARGE, b"y" * LARGE]
    asked.release_leases()


def test_what_was_received_for_a_model_that_was_loaded_again_is_copied_to_the_new_one(bench: Bench) -> None:
    old = bench.new_model()
    buffer = bench.placer.receive_buffer(old, LARGE, 0)
    assert buffer is not None
    buffer.view[:] = b"x" * LARGE
    asked = request(tensor(buffer.view[:]))
    bench.placer.place_large(asked, bench.model, buffer)
    buffer.release()
    assert bench.model.input_arena is not None
    span = asked.inputs[0].span
    assert span is not None
    assert span.lease.region is bench.model.input_arena.region
    assert bytes(asked.inputs[0].raw()) == b"x" * LARGE
    asked.release_leases()
    assert old.input_arena is not None
    old.input_arena.close()
    assert old.input_arena.region.closed


def test_buffers_take_half_of_the_arena_at_most(bench: Bench) -> None:
    half = bench.placer.receive_buffer(bench.model, CAPACITY // 2, 0)
    assert half is not None
    assert bench.placer.receive_buffer(bench.model, 1, 0) is None
    half.release()
    assert bench.placer.receive_buffer(bench.model, CAPACITY // 2 + 1, 0) is None
    assert bench.placer.receive_buffer(bench.model, CAPACITY // 2 - 10, 1) is None, "aligned it is larger"


def test_models_that_have_room_share_the_servers_budget(bench: Bench) -> None:
    bench.budget.limit_byte_size = CAPACITY
    other = bench.new_model()
    first, second = (request(tensor(bytes(CAPACITY // 2 + 1))) for _ in range(2))
    bench.placer.place_large(first, bench.model, None)
    with pytest.raises(ArenaFull):
        bench.placer.place_large(second, other, None)
    first.release_leases()
    bench.placer.place_large(second, other, None)
    second.release_leases()
    assert other.input_arena is not None
    other.input_arena.close()


def test_buffers_take_half_of_the_servers_budget_at_most(bench: Bench) -> None:
    bench.budget.limit_byte_size = CAPACITY // 2
    half = bench.placer.receive_buffer(bench.model, CAPACITY // 4, 0)
    assert half is not None
    other = bench.new_model()
    assert bench.placer.receive_buffer(other, 1, 0) is None
    copied = request(tensor(bytes(CAPACITY // 4)))
    bench.placer.place_large(copied, other, None)
    copied.release_leases()
    half.release()
    assert other.input_arena is not None
    other.input_arena.close()


def test_without_a_descriptor_for_an_arena_a_message_is_received_elsewhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("shm.arena.os.memfd_create", fail)
    assert bench.placer.receive_buffer(bench.model, LARGE, 0) is None
    request = Request("m", [Tensor("IN", "UINT8", [LARGE], bytes(LARGE))], RecordingSink())
    with pytest.raises(OSError, match="Too many open files"):
        bench.placer.place_large(request, bench.model, None)


def test_an_error_says_which_limit_is_too_small_for_ever() -> None:
    refusals = MemoryRefusals(1000, ByteBudget(5000))
    found = [(error.message, error.retry_later) for error in map(refusals.no_room, (900, 1001, 5001))]
    never = "bytes is larger than all memory that there is for it"
    assert found == [
        ("no memory left for a tensor of 900 bytes; try again later", True),
        (f"a tensor of 1001 {never} (--arena-byte-size=1000)", False),
        (f"a tensor of 5001 {never} (--memory-byte-size=5000)", False),
    ]
    assert refusals.count == 3


def test_the_log_says_what_is_in_use_and_which_flag_limits_it(caplog: pytest.LogCaptureFixture) -> None:
    budget = ByteBudget(5000)
    budget.add(4500)
    MemoryRefusals(1000, budget).full()
    assert [record.getMessage() for record in caplog.records] == [
        "a request is refused: no memory left: tensors of other requests take all of it; try again later; "
        "all requests together use 4500 of 5000 bytes (--memory-byte-size)"
    ]


def test_without_a_budget_only_the_limit_of_a_model_counts() -> None:
    assert "--arena-byte-size=1000" in MemoryRefusals(1000, None).no_room(2000).message
