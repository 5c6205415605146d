"""What `protocols/grpc/grpclib_internals.py` uses of grpclib without a promise: an update that breaks it fails here."""

from __future__ import annotations

import ast
import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import grpclib.server
import grpclib.stream
import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import GRPCError
from grpclib.metadata import encode_grpc_message
from h2.exceptions import StreamClosedError
from hypothesis import given
from hypothesis import strategies as st

from protocols.grpc import grpclib_internals as internals
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.grpclib_internals import MAX_STATUS_BYTE_SIZE, clean, status_text
from protocols.grpc.handlers import HandlerCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

if TYPE_CHECKING:
    Stream = grpclib.server.Stream[Any, Any]

PATH = "/service/Method"

FIELDS = [
    (":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "a"), ("te", "trailers"),
    ("content-type", "application/grpc"), ("user-agent", "me"), ("key", "value"), ("raw-bin", "AAE="),
]  # fmt: skip

REQUEST = HealthCheckRequest(service="s").SerializeToString()

RESPONSE = HealthCheckResponse(status=HealthCheckResponse.SERVING)


class FakeTransport(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 7) if name == "peername" else default


class FakeStream:
    """A `grpclib_internals.CallStream` that notes what it is asked for, in order."""

    def __init__(self, gone: bool = False) -> None:
        self._transport: asyncio.Transport = FakeTransport()
        self.connection = internals.CallConnection(self._transport)
        self.wrapper: internals.Wrapper | None = None
        self.closable = True
        self.calls: list[tuple[object, ...]] = []
        self._gone = gone
        self._parts = [bytes(1) + len(REQUEST).to_bytes(4, "big"), REQUEST]

    async def recv_data(self, size: int) -> bytes:
        part = self._parts.pop(0) if self._parts else b""
        assert len(part) in (size, 0)
        return part

    async def send_headers(self, headers: list[tuple[str, str]], end_stream: bool = False) -> None:
        if self._gone:
            raise StreamClosedError(1)
        self.calls.append(("trailers" if end_stream else "headers", dict(headers)))

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        assert not end_stream
        self.calls.append(("data", data))

    async def reset(self) -> None:
        self.calls.append(("reset",))

    def reset_nowait(self) -> None:
        self.calls.append(("reset_nowait",))

    def release(self) -> None:
        self.calls.append(("release",))


def run(
    handle: Callable[[Stream], Awaitable[None]],
    fields: list[tuple[str, str]] = FIELDS,
    *,
    cardinality: Cardinality = Cardinality.UNARY_UNARY,
    stream: FakeStream | None = None,
) -> list[tuple[object, ...]]:
    """Return what is asked of the stream of a call that `handle` answers."""
    stream = stream or FakeStream()
    handler = Handler(handle, cardinality, HealthCheckRequest, HealthCheckResponse)
    asyncio.run(internals.run_handler({PATH: handler}, stream, fields))
    return stream.calls


async def answer(stream: Stream) -> None:
    assert await stream.recv_message() == HealthCheckRequest(service="s")
    await stream.send_message(RESPONSE)


# ---- signatures and attributes ---------------------------------------------------------------


def test_the_handler_of_requests_takes_what_we_give() -> None:
    assert list(inspect.signature(grpclib.server.request_handler).parameters) == [
        "mapping", "_stream", "headers", "codec", "status_details_codec", "dispatch", "release_stream",
    ]  # fmt: skip
    assert not inspect.signature(_DispatchServerEvents).parameters
    assert all(each.default is not each.empty for each in inspect.signature(ProtoCodec).parameters.values())


def attributes_of(name: str, *sources: object) -> set[str]:
    """Return the attributes that the code of `sources` uses of what it calls `name`."""
    return {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(inspect.getsource(source)))  # type: ignore[arg-type]  # functions and classes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name
    }


def test_grpclib_uses_nothing_of_a_stream_but_what_ours_has() -> None:
    used = attributes_of("self._stream", grpclib.server.Stream)
    used |= attributes_of("_stream", grpclib.server.request_handler)
    used |= attributes_of("h2_stream", grpclib.server._abort)
    used |= attributes_of("stream", grpclib.stream.recv_message, grpclib.stream.send_message)
    assert used == {
        "_transport", "closable", "connection", "recv_data", "reset", "reset_nowait", "send_data", "send_headers",
        "wrapper",
    }  # fmt: skip
    ours = set(dir(HandlerCall)) | {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(HandlerCall)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert used <= ours


def test_grpclib_uses_nothing_of_a_connection_but_what_ours_has() -> None:
    used = attributes_of("self._stream.connection", grpclib.server.Stream)
    assert used == {
        "get_peer", "last_message_received", "last_message_sent", "messages_received", "messages_sent",
    }  # fmt: skip
    assert used <= set(dir(internals.CallConnection))


# ---- calls -----------------------------------------------------------------------------------


def test_a_unary_call_sends_headers_a_message_and_the_status_and_is_released() -> None:
    message = RESPONSE.SerializeToString()
    assert run(answer) == [
        ("headers", {":status": "200", "content-type": "application/grpc+proto"}),
        ("data", bytes(1) + len(message).to_bytes(4, "big") + message),
        ("trailers", {"grpc-status": "0"}),
        ("release",),
    ]


def test_a_handler_knows_its_stream_metadata_peer_and_user_agent() -> None:
    stream, seen = FakeStream(), []

    async def handle(given: Stream) -> None:
        assert internals.stream_of(given) is stream
        assert given.metadata is not None
        seen.append((dict(given.metadata), given.user_agent, given.peer.addr()))
        await answer(given)

    run(handle, stream=stream)
    assert seen == [({"key": "value", "raw-bin": b"\0\1"}, "me", ("127.0.0.1", 7))]


def test_an_error_of_a_handler_is_the_status_and_ends_the_stream() -> None:
    async def handle(stream: Stream) -> None:
        raise GRPCError(Status.NOT_FOUND, "none")

    trailers = {
        ":status": "200", "content-type": "application/grpc+proto", "grpc-status": "5", "grpc-message": "none",
    }  # fmt: skip
    assert run(handle) == [("trailers", trailers), ("reset_nowait",), ("release",)]


def test_a_path_without_a_handler_is_not_implemented() -> None:
    fields = [(name, "/other" if name == ":path" else value) for name, value in FIELDS]
    trailers = {":status": "200", "grpc-status": "12", "grpc-message": "Method not found"}
    assert run(answer, fields) == [("trailers", trailers), ("reset_nowait",), ("release",)]


def test_a_call_that_is_cancelled_with_an_error_has_it_as_status() -> None:
    """With a deadline and without one."""

    async def handle(stream: Stream) -> None:
        wrapper = internals.stream_of(stream).wrapper  # type: ignore[attr-defined]
        assert isinstance(wrapper, internals.Wrapper)
        asyncio.get_running_loop().call_soon(wrapper.cancel, GRPCError(Status.UNAVAILABLE, "the end"))
        await asyncio.Event().wait()

    for fields in (FIELDS, [*FIELDS, ("grpc-timeout", "1H")]):
        (kind, trailers), *rest = run(handle, fields)
        assert kind == "trailers"
        assert isinstance(trailers, dict)
        assert (trailers["grpc-status"], trailers["grpc-message"]) == ("14", "the end")
        assert rest == [("reset_nowait",), ("release",)]


def test_a_call_whose_time_is_over_has_that_as_status() -> None:
    async def handle(stream: Stream) -> None:
        await asyncio.Event().wait()

    (_, trailers), *_ = run(handle, [*FIELDS, ("grpc-timeout", "1m")])
    assert isinstance(trailers, dict)
    assert trailers["grpc-status"] == "4"


def test_a_stream_that_is_closed_when_its_status_is_sent_harms_nobody() -> None:
    async def handle(stream: Stream) -> None:
        raise GRPCError(Status.NOT_FOUND)

    assert run(handle, stream=FakeStream(gone=True)) == [("release",)]


def test_initial_metadata_may_be_sent_before_any_message() -> None:
    async def handle(stream: Stream) -> None:
        await stream.send_initial_metadata()

    calls = run(handle, cardinality=Cardinality.STREAM_STREAM)
    assert [kind for kind, *_ in calls] == ["headers", "trailers", "release"]


# ---- metadata --------------------------------------------------------------------------------


def test_texts_and_times_are_encoded_as_grpc_has_them() -> None:
    assert internals.decode_timeout("20m") == 0.02
    with pytest.raises(ValueError, match="20x"):
        internals.decode_timeout("20x")
    assert internals.decode_bin_value(b"AAE") == internals.decode_bin_value(b"AAE=") == b"\0\1"
    assert internals.encode_grpc_message("50 % ä\n") == "50 %25 %C3%A4%0A"
    assert dict(internals.decode_metadata(FIELDS)) == {"key": "value", "raw-bin": b"\0\1"}


def test_the_error_for_a_closed_stream_takes_its_number() -> None:
    assert internals.StreamClosedError is StreamClosedError
    assert StreamClosedError(7).stream_id == 7


def test_ordinary_text_is_left_as_it_is() -> None:
    text = "line one\nline 'two' \"quoted\" 100% é 😀"
    assert clean(text) == text
    assert status_text(text) == text


def test_characters_that_utf8_cannot_encode_become_question_marks() -> None:
    assert clean("caf\udce9") == "caf?"


@given(st.text("a \n%é😀\udce9", max_size=50), st.integers(1, 400))
def test_a_long_status_is_cut_to_what_clients_accept(piece: str, count: int) -> None:
    text = status_text(piece * count)
    assert len(encode_grpc_message(text)) <= MAX_STATUS_BYTE_SIZE
    assert clean(piece * count).startswith(text)


def test_a_status_that_just_fits_is_not_cut() -> None:
    text = "a" * MAX_STATUS_BYTE_SIZE
    assert status_text(text) == text
    assert status_text(text + "b") == text
