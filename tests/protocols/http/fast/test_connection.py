"""What a client sees of one connection of the HTTP port: order, pipelining, pauses, limits, ends.

One file, because its tests share the requests and responses that it begins with; `test_shared_aiohttp.py` has what
aiohttp serves on such a connection.
"""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InvalidArgument
from kernel.loop.iteration_end import IterationEnd
from kernel.serving.response import Response
from protocols.http.fast.connection import MAX_PIPELINED
from protocols.loop_budgets import ITERATION_NS
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.request import Request

    WithFastPath = Callable[[Callable[[Any], Awaitable[None]]], None]

LARGE_BYTE_SIZE = 5 << 20
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def infer(*values: float, model: str = "echo", id: str = "", binary: bool = False) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}
    parameters = {"binary_data_output": True} if binary else {}
    body = json.dumps({"id": id, "inputs": [tensor], "parameters": parameters}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def respond(request: Request, release: Callable[[], None] | None = None) -> None:
    if release is None:
        output = Tensor("OUT_IN", "FP32", [1], bytes(4))
    else:
        output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), release)
    request.respond(Response("stuck", "1", request.id, outputs=[output], leased=release is not None))


def respond_large(request: Request, release: Callable[[], None] = lambda: None) -> None:
    output = leased_tensor("OUT_IN", "UINT8", [LARGE_BYTE_SIZE], bytes(LARGE_BYTE_SIZE), release)
    request.respond(Response("stuck", "1", request.id, outputs=[output], leased=True))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)


def statuses(written: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", written)]


def test_a_request_is_served_in_the_call_that_brings_its_last_byte(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        for place, byte in enumerate(infer(1)):
            assert lab.transport.written == b"", place
            lab.connection.data_received(bytes([byte]))
        assert statuses(lab.transport.written) == [200]
        lab.transport.writes.clear()
        lab.connection.data_received(infer(1) + infer(2, 3))
        assert statuses(lab.transport.written) == [200, 200]

    with_fast_path(test)


@pytest.mark.slow_loop("the test itself sends and compares up to 20 MiB in one step")
@pytest.mark.parametrize("byte_size", [4 << 10, 1 << 20, (20 << 20) + 4])
def test_a_large_body_arrives_whole_in_whatever_parts_it_comes(with_fast_path: WithFastPath, byte_size: int) -> None:
    async def test(lab: Any) -> None:
        data = bytes(range(256)) * (byte_size // 256) + bytes(byte_size % 256)
        parameters = {"binary_data_size": byte_size}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [byte_size // 4], "parameters": parameters}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        sent = (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(header), len(header) + byte_size)
        )
        sent += header + data + infer(1, id="next")
        for place in range(0, len(sent), 100_000):
            lab.connection.data_received(sent[place : place + 100_000])
        await until(lambda: not lab.connection.busy)  # a large response leaves in pieces
        assert statuses(lab.transport.written) == [200, 200]
        assert b"}" + data + b"HTTP/1.1 200" in lab.transport.written

    with_fast_path(test)


def test_an_announced_size_alone_takes_no_memory(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        tracemalloc.start()
        try:
            lab.connection.data_received(
                b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 10\r\n"
                b"Content-Length: 2000000000\r\n\r\n{"
            )
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()

    with_fast_path(test)


def test_responses_are_in_the_order_of_the_requests(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(b"".join(infer(1, model="stuck", id=f"number {place}") for place in range(3)))
        respond(lab.waiting[2])
        respond(lab.waiting[1])
        assert lab.transport.written == b""
        respond(lab.waiting[0])
        assert len(lab.transport.writes) == 1
        assert re.findall(rb"number \d", lab.transport.written) == [b"number 0", b"number 1", b"number 2"]

    with_fast_path(test)


def test_responses_that_come_together_are_all_made_before_the_first_is_written(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        other, other_transport = lab.another_connection()
        lab.connection.data_received(infer(1, model="stuck"))
        other.data_received(infer(1, model="stuck"))
        IterationEnd.current().joins_writes = True
        for request in lab.waiting:
            respond(request)
        IterationEnd.current().joins_writes = False
        assert lab.transport.written == other_transport.written == b""
        await asyncio.sleep(0)
        assert statuses(lab.transport.written) == statuses(other_transport.written) == [200]
        await asyncio.sleep(0)
        assert len(lab.transport.writes) == 1

    with_fast_path(test)


@pytest.mark.parametrize("next_step", ["another request", "a stop", "a timeout", "a lost connection"])
def test_a_response_that_waits_to_be_written_leaves_before_anything_else(
    with_fast_path: WithFastPath, next_step: str
) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck", id="first"))
        IterationEnd.current().joins_writes = True
        respond(lab.waiting[0])
        IterationEnd.current().joins_writes = False
        if next_step == "another request":
            lab.connection.data_received(infer(1, id="second"))
            assert re.findall(rb"first|second", lab.transport.written) == [b"first", b"second"]
        elif next_step == "a stop":
            lab.connection.close_when_idle()
            assert lab.transport.closed
            assert statuses(lab.transport.written) == [200]
        elif next_step == "a timeout":
            lab.pass_s(10_000)
            assert lab.transport.closed
            assert statuses(lab.transport.written) == [200]
        else:
            lab.connection.connection_lost(None)
        written = lab.transport.written
        await asyncio.sleep(0)
        assert lab.transport.written == written

    with_fast_path(test)


def test_what_follows_a_large_response_is_written_after_it(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        released: list[bool] = []
        lab.connection.data_received(infer(1, model="stuck", id="1", binary=True) + infer(1, model="stuck", id="2"))
        respond_large(lab.waiting[0], lambda: released.append(True))
        respond(lab.waiting[1])
        lab.connection.data_received(infer(1, model="stuck", id="3"))
        assert not released
        assert not lab.transport.reading, "nothing is begun before it is written"
        await until(lambda: len(lab.waiting) == 3)
        assert released == [True]
        respond(lab.waiting[2])
        assert re.findall(rb'"id":"(\d)"', lab.transport.written) == [b"1", b"2", b"3"]
        assert lab.transport.reading

    with_fast_path(test)


def test_no_more_than_32_requests_wait_for_their_responses(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck") * 40)
        await asyncio.sleep(0)
        assert len(lab.waiting) == 32
        assert not lab.transport.reading
        for request in lab.waiting[:32]:
            respond(request)
        await asyncio.sleep(0)
        assert len(lab.waiting) == 40
        assert lab.transport.reading

    with_fast_path(test)


def test_few_requests_of_many_connections_wait_behind_others_of_their_connection(
    with_fast_path: WithFastPath,
) -> None:
    async def test(lab: Any) -> None:
        others = [lab.another_connection() for _ in range(100)]
        for connection, _ in others:
            connection.data_received(infer(1, model="stuck") * 32)
        for _ in range(100):
            await asyncio.sleep(0)
        assert MAX_PIPELINED <= len(lab.waiting) <= MAX_PIPELINED + 2 * len(others)
        assert len({request.sink.waiter for request in lab.waiting}) == len(others), "each has one in flight"
        for request in lab.waiting:  # which grows
            respond(request)
            await asyncio.sleep(0)
        assert len(lab.waiting) == 32 * len(others)
        assert {len(statuses(transport.written)) for _, transport in others} == {32}
        assert lab.fast_path.pipelined_count == 0

    with_fast_path(test)


def test_requests_of_a_client_that_has_gone_are_not_counted_as_waiting(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        connection, _ = lab.another_connection()
        connection.data_received(infer(1, model="stuck") * 20)
        assert lab.fast_path.pipelined_count >= 18
        connection.connection_lost(None)
        assert lab.fast_path.pipelined_count == 0

    with_fast_path(test)


def test_many_small_requests_do_not_keep_other_connections_waiting(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1) * 100)
        assert len(statuses(lab.transport.written)) == 32
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(statuses(lab.transport.written)) == 100

    with_fast_path(test)


def test_many_connections_with_many_small_requests_share_an_iteration(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        others = [lab.another_connection() for _ in range(50)]
        for connection, _ in others:
            connection.data_received(infer(1) * 32)

        def responses() -> int:
            return sum(len(statuses(transport.written)) for _, transport in others)

        done = responses()
        assert done <= 2 * 32 + 48, "the first two use the budget up, each of the others gets one"
        while done < 50 * 32:
            await asyncio.sleep(0)
            before, done = done, responses()
            assert 0 < done - before <= 64
            lab.transport.writes.clear()
            lab.connection.data_received(infer(1))
            assert statuses(lab.transport.written) == [200], "a single request does not wait"
        assert all(transport.reading for _, transport in others)

    with_fast_path(test)


def test_requests_that_take_long_to_decode_share_an_iteration_by_their_time(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        fast_path = lab.fast_path
        decode = fast_path.inference.decode_and_check

        def decode_slowly(*arguments: Any) -> Any:
            fast_path.messages.spent(ITERATION_NS)
            return decode(*arguments)

        fast_path.inference.decode_and_check = decode_slowly
        fast_path.inference.match = lambda *_: None
        other, transport = lab.another_connection()
        lab.connection.data_received(infer(1) * 10)
        other.data_received(infer(1))
        assert (len(statuses(lab.transport.written)), len(statuses(transport.written))) == (1, 0)
        done = 1
        while done < 11:
            await asyncio.sleep(0)
            before, done = done, len(statuses(lab.transport.written)) + len(statuses(transport.written))
            assert done <= before + 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert lab.transport.reading
        assert transport.reading

    with_fast_path(test)


def test_a_client_that_goes_away_cancels_what_it_asked_for(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck") * 2)
        lab.connection.connection_lost(None)
        assert [request.cancelled for request in lab.waiting] == [True, True]
        await lab.kernel.resolve("stuck").drain()
        assert lab.transport.written == b""

    with_fast_path(test)


def test_responses_are_released_when_they_are_written_or_the_client_has_gone(
    with_fast_path: WithFastPath,
) -> None:
    async def test(lab: Any) -> None:
        released: list[int] = []
        lab.connection.data_received(infer(1, model="stuck") * 2)
        respond(lab.waiting[0], lambda: released.append(0))
        assert released == [0]
        lab.fast_path.kernel.cancel = lambda request: None
        lab.connection.connection_lost(None)
        respond(lab.waiting[1], lambda: released.append(1))
        assert released == [0, 1]

    with_fast_path(test)


def test_more_than_one_response_is_an_error(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck") * 2)
        released: list[int] = []
        for number in range(2):
            output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), lambda: released.append(1))
            lab.waiting[0].respond(Response("stuck", "1", "", outputs=[output], final=number == 1, leased=True))
        lab.waiting[1].respond(Response("stuck", "1", ""))
        assert released == [1, 1]
        assert re.findall(rb"expected a single response, got \d", lab.transport.written) == [
            b"expected a single response, got 2",
            b"expected a single response, got 0",
        ]
        assert statuses(lab.transport.written) == [500, 500]

    with_fast_path(test)


def test_an_unexpected_exception_is_a_number_for_the_client(
    with_fast_path: WithFastPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: object) -> None:
        raise ZeroDivisionError("the secret of the server")

    async def test(lab: Any) -> None:
        monkeypatch.setattr("protocols.http.inference.infer_call.decode_body", broken)
        lab.connection.data_received(infer(1))
        monkeypatch.undo()
        assert statuses(lab.transport.written) == [500]
        assert b"internal error (see " in lab.transport.written
        assert b"secret" not in lab.transport.written
        assert "POST /v2/models/echo/infer" in caplog.text

    with_fast_path(test)


# ---- times ----------------------------------------------------------------------------------


def test_an_idle_connection_is_closed(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.pass_s(74)
        lab.connection.data_received(infer(1))
        lab.pass_s(74)
        assert not lab.transport.closed
        lab.pass_s(1)
        assert lab.transport.closed

    with_fast_path(test)


def test_a_request_that_runs_may_take_its_time(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck"))
        lab.pass_s(1000)
        assert not lab.transport.closed

    with_fast_path(test)


def test_a_head_must_be_there_in_time_whatever_trickles(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        for byte in infer(1)[:10]:
            lab.connection.data_received(bytes([byte]))
            assert not lab.transport.closed
            lab.pass_s(1)
        assert lab.transport.closed

    with_fast_path(test)


def test_a_body_that_does_not_go_on_is_given_up(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1)[:-5])
        lab.pass_s(29)
        assert lab.transport.written == b""
        lab.pass_s(1)
        assert statuses(lab.transport.written) == [408]
        assert b"\r\nConnection: close\r\n" in lab.transport.written
        assert b'{"error":"Request Timeout"}' in lab.transport.written
        assert lab.transport.closed

    with_fast_path(test)


def test_a_body_that_comes_too_slowly_is_given_up(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        for _ in range(30):
            assert lab.transport.written == b""
            lab.connection.data_received(b"x" * 10)
            lab.pass_s(1)
        lab.pass_s(1)
        assert statuses(lab.transport.written) == [408]

    with_fast_path(test)


def test_a_client_that_does_not_read_is_dropped(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.transport.unsent = 1000
        lab.connection.pause_writing()
        lab.pass_s(59)
        lab.transport.unsent = 999
        lab.pass_s(59)  # it has read something
        lab.pass_s(59)
        assert not lab.transport.aborted
        lab.pass_s(1)
        assert lab.transport.aborted

    with_fast_path(test)


def test_nothing_is_begun_for_a_client_that_does_not_read(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.pause_writing()
        lab.connection.data_received(infer(1))
        assert lab.transport.written == b""
        assert not lab.transport.reading
        lab.connection.resume_writing()
        assert statuses(lab.transport.written) == [200]
        assert lab.transport.reading

    with_fast_path(test)


# ---- aiohttp on the same transport -------------------------------------------------------------


def test_other_requests_are_served_in_order_among_those_of_inference(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck", id="first") + HEALTH + HEALTH + infer(2, id="last"))
        await asyncio.sleep(0)
        assert lab.transport.written == b""
        assert not lab.transport.reading
        respond(lab.waiting[0])
        await until(lambda: b"last" in lab.transport.written)
        first, *empty, last = lab.transport.written.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert b'"id":"first"' in first
        assert [part.endswith(b"\r\n\r\n") for part in empty] == [True, True]
        assert b'"id":"last"' in last
        assert lab.transport.reading

    with_fast_path(test)


def test_a_connection_that_aiohttp_has_used_is_not_closed_by_it(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(HEALTH)
        await until(lambda: statuses(lab.transport.written) == [200])
        await asyncio.sleep(0)
        lab.pass_s(74)
        assert not lab.transport.closed
        lab.pass_s(1)
        assert lab.transport.closed

    with_fast_path(test)


@pytest.mark.parametrize("before", [b"", HEALTH])
def test_what_is_not_plain_makes_the_connection_aiohttps(with_fast_path: WithFastPath, before: bytes) -> None:
    async def test(lab: Any) -> None:
        if before:
            lab.connection.data_received(before)
            await until(lambda: statuses(lab.transport.written) == [200])
            lab.transport.writes.clear()
        lab.connection.data_received(infer(1, model="stuck") + b"GET /v2 HTTP/1.0\r\n\r\n")
        assert lab.transport.protocol is None
        respond(lab.waiting[0])
        connection = lab.transport.protocol
        assert connection is not None
        assert not lab.transport.closed
        await until(lambda: lab.transport.written.count(b"\r\n\r\n") == 2)
        connection.connection_lost(None)

    with_fast_path(test)


# ---- requests that are the last of their connection -----------------------------------------


def last(request: bytes) -> bytes:
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


@pytest.mark.parametrize("piece", [1, 40, 10_000])
def test_a_request_that_closes_its_connection_is_served_as_others_are(with_fast_path: WithFastPath, piece: int) -> None:
    async def test(lab: Any) -> None:
        sent = infer(1) + last(infer(2, model="stuck"))
        for start in range(0, len(sent), piece):
            lab.connection.data_received(sent[start : start + piece])
        assert statuses(lab.transport.written) == [200]
        assert not lab.transport.closed
        lab.connection.data_received(infer(3))
        respond(lab.waiting[0])
        assert statuses(lab.transport.written) == [200, 200]
        assert lab.transport.written.count(b"\r\nConnection: close\r\n\r\n") == 1
        assert lab.transport.closed

    with_fast_path(test)


def test_a_large_last_response_is_written_before_the_connection_is_closed(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(last(infer(1, model="stuck", binary=True)))
        respond_large(lab.waiting[0])
        assert not lab.transport.closed
        await until(lambda: lab.transport.closed)
        assert len(lab.transport.written) > LARGE_BYTE_SIZE

    with_fast_path(test)


# ---- stopping -------------------------------------------------------------------------------


def test_a_stop_closes_what_is_idle(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.close_when_idle()
        assert lab.transport.closed

    with_fast_path(test)


def test_a_stop_lets_requests_be_received_and_served_but_begins_no_more(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        sent = infer(1, model="stuck") + infer(2)
        lab.connection.data_received(sent[:-5])
        lab.connection.close_when_idle()
        respond(lab.waiting[0])
        assert not lab.transport.closed
        assert b"Connection: close" not in lab.transport.written
        lab.connection.data_received(sent[-5:] + infer(3))
        assert statuses(lab.transport.written) == [200, 200]
        assert lab.transport.written.count(b"\r\nConnection: close\r\n\r\n") == 1
        assert lab.transport.closed

    with_fast_path(test)


def test_a_stop_lets_a_large_response_be_written(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck", binary=True))
        respond_large(lab.waiting[0])
        lab.connection.close_when_idle()
        assert len(lab.transport.written) < LARGE_BYTE_SIZE
        assert not lab.transport.closed
        await until(lambda: lab.transport.closed)
        assert len(lab.transport.written) > LARGE_BYTE_SIZE

    with_fast_path(test)


def test_the_fast_path_aborts_what_does_not_end_in_time(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(infer(1, model="stuck"))
        await lab.fast_path.close(0.001)
        assert lab.transport.aborted
        lab.waiting[0].fail(InvalidArgument("late"))

    with_fast_path(test)


def test_a_response_that_waits_for_those_before_it_is_released_when_the_client_goes(
    with_fast_path: WithFastPath,
) -> None:
    async def test(lab: Any) -> None:
        released: list[bool] = []
        lab.connection.data_received(infer(1, model="stuck", id="1") + infer(1, model="stuck", id="2", binary=True))
        respond_large(lab.waiting[1], lambda: released.append(True))
        assert not released
        lab.connection.connection_lost(None)
        assert released == [True]

    with_fast_path(test)
