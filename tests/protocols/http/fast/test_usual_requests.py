"""What clients send all the time is taken in one step, and becomes what it becomes otherwise."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.catalog import ModelState
from kernel.serving.response import Response
from protocols.http.fast.call import BodyReceiver, FastCall
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.request import Request

    WithFastPath = Callable[[Callable[[Any], Awaitable[None]]], None]


def infer(data: bytes = bytes(4), *, model: str = "echo", id: str = "") -> tuple[bytes, bytes]:
    """Return head and body of a request whose tensors are all binary data."""
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(data) // 4], "parameters": parameters}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps({"id": id, **document} if id else document).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + len(data)}\r\n\r\n"
    )
    return head.encode(), text + data


def whole(data: bytes = bytes(4), **more: str) -> bytes:
    return b"".join(infer(data, **more))


def respond(request: Request, release: Callable[[], None] | None = None) -> None:
    if release is None:
        output = Tensor("OUT_IN", "FP32", [1], bytes(4))
    else:
        output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), release)
    request.respond(Response("stuck", "1", request.id, outputs=[output], leased=release is not None))


def statuses(written: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", written)]


REQUESTS = [
    infer(number.to_bytes(4, "little") * count, id=id)
    for number, (id, count) in enumerate([("", 1), ("", 1), ("", 2), ("", 2), ("1", 1), ("2", 1), ("12", 1), ("13", 1)])
]


@pytest.mark.parametrize(
    "parts",
    [
        [head + body for head, body in REQUESTS],
        [part for request in REQUESTS for part in request],
        [part for head, body in REQUESTS for part in (head, body[:5], body[5:])],
        [part for head, body in REQUESTS for part in (head + body[:5], body[5:])],
        [part for head, body in REQUESTS for part in (head[:5], head[5:] + body)],
        [
            part
            for before, after in zip(REQUESTS[::2], REQUESTS[1::2], strict=True)
            for part in (before[0], before[1] + after[0], after[1])
        ],
    ],
)
def test_requests_get_the_same_responses_however_they_are_cut(with_fast_path: WithFastPath, parts: list[bytes]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(b"".join(parts))
        expected = lab.transport.written
        assert statuses(expected) == [200] * len(REQUESTS)
        for _ in range(2):
            lab.transport.writes.clear()
            for part in parts:
                lab.connection.data_received(part)
            assert re.sub(rb"Date: .*", b"", lab.transport.written) == re.sub(rb"Date: .*", b"", expected)

    with_fast_path(test)


def test_a_response_has_the_time_of_its_second(with_fast_path: WithFastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(lab: Any) -> None:
        for second in range(3):
            monkeypatch.setattr("protocols.http.fast.response_bytes.time.time", lambda second=second: second)
            lab.pass_s(1)
            lab.transport.writes.clear()
            for _ in range(3):
                lab.connection.data_received(whole())
            times = re.findall(rb"Date: Thu, 01 Jan 1970 00:00:0(\d) GMT", lab.transport.written)
            assert times == [b"%d" % second] * 3

    with_fast_path(test)


def test_an_unloaded_model_gets_no_more_requests(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        for _ in range(2):
            lab.connection.data_received(whole())
        catalog = lab.kernel.catalog
        catalog.set_state("echo", 1, ModelState.UNLOADING, "", lab.kernel.resolve("echo"))
        lab.transport.writes.clear()
        lab.connection.data_received(whole())
        assert statuses(lab.transport.written) == [404]

    with_fast_path(test)


def test_a_model_that_is_unloaded_while_a_body_is_awaited_gets_no_request(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        head, body = infer()
        lab.connection.data_received(head + body)
        lab.connection.data_received(head)
        lab.kernel.catalog.set_state("echo", 1, ModelState.UNLOADING, "", lab.kernel.resolve("echo"))
        lab.connection.data_received(body)
        assert statuses(lab.transport.written) == [200, 404]

    with_fast_path(test)


@pytest.mark.parametrize("cut", [False, True])
def test_a_client_that_does_not_read_gets_no_response(with_fast_path: WithFastPath, cut: bool) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(whole())
        lab.transport.writes.clear()
        lab.connection.pause_writing()
        for part in infer() if cut else [whole()]:
            lab.connection.data_received(part)
        assert lab.transport.written == b""
        assert not lab.transport.reading
        lab.connection.resume_writing()
        assert statuses(lab.transport.written) == [200]
        assert lab.transport.reading

    with_fast_path(test)


@pytest.mark.parametrize("cut", [False, True])
def test_no_more_than_32_requests_wait_however_they_come(with_fast_path: WithFastPath, cut: bool) -> None:
    async def test(lab: Any) -> None:
        for _ in range(40):
            for part in infer(model="stuck") if cut else [whole(model="stuck")]:
                lab.connection.data_received(part)
        assert len(lab.waiting) == 32
        assert not lab.transport.reading
        for request in lab.waiting[:32]:
            respond(request)
        await asyncio.sleep(0)
        assert len(lab.waiting) == 40

    with_fast_path(test)


def test_a_stop_begins_no_more_but_waits_for_a_body_whose_head_was_there(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        head, body = infer()
        lab.connection.data_received(head + body)
        lab.connection.data_received(head)
        lab.connection.close_when_idle()
        assert not lab.transport.closed
        lab.connection.data_received(body)
        assert statuses(lab.transport.written) == [200, 200]
        assert lab.transport.written.count(b"\r\nConnection: close\r\n\r\n") == 1
        assert lab.transport.closed
        lab.connection.data_received(head + body)
        assert statuses(lab.transport.written) == [200, 200]

    with_fast_path(test)


def test_a_stop_begins_no_more_behind_a_request_that_runs(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        for _ in range(2):
            lab.connection.data_received(whole(model="stuck"))
        lab.connection.close_when_idle()
        lab.connection.data_received(whole(model="stuck"))
        assert len(lab.waiting) == 2
        for request in lab.waiting:
            respond(request)
        assert lab.transport.written.count(b"\r\nConnection: close\r\n\r\n") == 1
        assert lab.transport.closed

    with_fast_path(test)


def test_a_body_that_does_not_follow_a_repeated_head_is_given_up(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        head, body = infer()
        lab.connection.data_received(head + body)
        lab.pass_s(70)
        lab.connection.data_received(head)
        lab.pass_s(29)
        assert statuses(lab.transport.written) == [200]
        lab.pass_s(1)
        assert statuses(lab.transport.written) == [200, 408]
        assert lab.transport.closed

    with_fast_path(test)


def test_outputs_are_released_when_they_were_copied(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        released: list[int] = []
        for number in range(4):
            lab.connection.data_received(whole(model="stuck", id="x"))
            respond(lab.waiting[number], functools.partial(released.append, number))
            assert released == list(range(number + 1))
        lab.connection.data_received(whole(model="stuck", id="x"))
        lab.kernel.cancel = lambda request: None
        lab.connection.connection_lost(None)
        respond(lab.waiting[4], lambda: released.append(4))
        assert released == [0, 1, 2, 3, 4]
        assert statuses(lab.transport.written) == [200] * 4

    with_fast_path(test)


@pytest.mark.parametrize("final", [True, False])
def test_a_prepared_request_has_exactly_one_response_too(with_fast_path: WithFastPath, final: bool) -> None:
    async def test(lab: Any) -> None:
        for _ in range(3):
            lab.connection.data_received(whole(model="stuck"))
        respond(lab.waiting[0])
        respond(lab.waiting[1])
        lab.transport.writes.clear()
        output = Tensor("OUT_IN", "FP32", [1], bytes(4))
        lab.waiting[2].respond(Response("stuck", "1", "", outputs=[output], final=False))
        assert lab.transport.written == b""
        lab.waiting[2].respond(Response("stuck", "1", "", outputs=None if final else [output]))
        assert statuses(lab.transport.written) == [200 if final else 500]

    with_fast_path(test)


@pytest.mark.slow_loop("the test walks all objects of the process")
def test_calls_with_a_response_leave_nothing_for_the_garbage_collector(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        gc.collect()
        gc.disable()
        try:
            earlier = [found for found in gc.get_objects() if type(found) is FastCall]  # such as of a test that failed
            known = set(map(id, earlier))
            for _ in range(10):
                lab.connection.data_received(whole())
            # The scheduler still holds the last request, and the prepared body was made of the first.
            calls = [found for found in gc.get_objects() if type(found) is FastCall and id(found) not in known]
            assert len(calls) <= 2
            assert sum(call.waiter is not None for call in calls) <= 1
        finally:
            gc.enable()

    with_fast_path(test)


# ---- bodies in memory of their model ----------------------------------------------------------

LARGE = bytes(range(256)) * 1024


def receive(receiver: BodyReceiver, octets: bytes) -> None:
    room = receiver.get_buffer(-1)
    room[: len(octets)] = octets
    receiver.buffer_updated(len(octets))


def test_a_large_body_is_received_where_it_belongs(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        for _ in range(2):
            sent = whole(LARGE)
            lab.connection.data_received(sent[:50_000])
            receiver = lab.transport.protocol
            assert isinstance(receiver, BodyReceiver)
            receive(receiver, sent[50_000:100_000])
            assert len(receiver.get_buffer(-1)) == len(sent) - 100_000
            assert lab.transport.protocol is not lab.connection
            receive(receiver, sent[100_000:])
            assert lab.transport.protocol is lab.connection
            assert statuses(lab.transport.written) == [200]
            assert lab.transport.written.endswith(b"}" + LARGE)
            lab.transport.writes.clear()
            lab.connection.data_received(whole())
            assert statuses(lab.transport.written) == [200]
            lab.transport.writes.clear()

    with_fast_path(test)


def test_a_client_that_goes_away_within_a_large_body_leaves_no_memory_behind(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(whole(LARGE)[:50_000])
        arena = lab.kernel.resolve("echo").input_arena
        assert arena.allocator.block_count == 1
        lab.transport.protocol.connection_lost(None)
        assert arena.allocator.block_count == 0
        assert lab.fast_path.connection_count == 0

    with_fast_path(test)


def test_a_client_that_does_not_read_is_known_while_its_body_comes(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        sent = whole(LARGE)
        lab.connection.data_received(whole(model="stuck") + sent[:50_000])
        receiver = lab.transport.protocol
        receiver.pause_writing()
        lab.transport.unsent = 10
        receive(receiver, sent[50_000:])
        lab.connection.data_received(whole())
        assert not lab.transport.reading
        lab.transport.unsent = 0
        receiver.resume_writing()
        assert lab.transport.reading
        respond(lab.waiting[0])
        assert statuses(lab.transport.written) == [200, 200, 200]

    with_fast_path(test)
