"""What is fuzzed: functions that take any bytes, and raise only if something is wrong.

Each gives the bytes to a parser of ours and takes the errors that the parser promises. Where there are two paths, both
must find the same.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from backends.transport import wire
from backends.transport.framing import MAX_KERNEL_FRAME, MAX_WORKER_FRAME, FrameReader
from kernel.cache.encoding import BadEntry
from kernel.cache.encoding import decode as decode_entry
from kernel.config.check import check_complete, check_config
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_json, from_pbtxt
from kernel.config.spec import model_spec
from kernel.errors import ServingError
from kernel.records.recording_format import UNREADABLE, BadRecording, SegmentReader, decode_record
from kernel.serving.request import NO_SINK
from protocols.grpc.codec import decode_request, start_request
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.headers import status_trailers
from protocols.grpc.h2.streams import StreamEvent
from protocols.grpc.large_request import DecodeMessageArguments, decode_message_task
from protocols.http.fast.request_heads import can_become_head, parse_head
from protocols.http.json.document import parse
from protocols.large_requests import read_description, read_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from tests.protocols.http.inference.json_lab import Lab

MAX_INPUT_SIZE = 1 << 20


def http_head(octets: bytes) -> None:
    """A head of the fast path: what is parsed could become a head at each of its beginnings."""
    head = parse_head(octets, MAX_INPUT_SIZE)
    if head is not None:
        for end in range(1, len(octets), max(1, len(octets) // 16)):
            assert can_become_head(octets[:end]), f"{octets[:end]!r} is refused too early"


@functools.cache
def _lab() -> Lab:
    from tests.protocols.http.inference.json_lab import Lab

    return Lab()


def http_json(octets: bytes) -> None:
    """Bodies of inference requests: a server that has seen the first one responds to others as one that has not."""
    from protocols.http.inference.infer_call import HttpInference
    from tests.protocols.http.inference.json_lab import MAX_INPUT_SIZE as LIMIT
    from tests.protocols.http.inference.json_lab import USUAL

    names = sorted(USUAL)
    model = names[octets[0] % len(names)] if octets else names[0]
    lab, bodies = _lab(), octets[1:].split(b"\x1e")[:4]
    warm = HttpInference(lab.kernel, LIMIT)
    for body in (*bodies, *bodies):
        found = lab.response(warm, model, body)
        assert found == lab.response(HttpInference(lab.kernel, LIMIT), model, body)


def h2(octets: bytes) -> None:
    """Frames of HTTP/2: the connection never raises, answers with whole frames, and ends with nothing left."""
    step, responds = (octets[0] % 64 + 1, bool(octets[0] & 64)) if octets else (1, False)
    connection = H2Connection()
    received = frames.PREFACE + frames.settings([]) + octets[1:]
    buffer = written = b""
    for start in range(0, len(received), step):
        buffer += received[start : start + step]
        buffer = buffer[connection.receiving.receive(memoryview(buffer), start) :]
        _respond(connection, responds)
        connection.sending.pump(2**20)
        written += b"".join(connection.sending.write_queue.take())
        assert len(connection.streams.by_id) <= limits.MAX_CONCURRENT_STREAMS
    while written:
        high, low, *_ = frames.FRAME_HEADER.unpack_from(written)
        end = 9 + (high << 8 | low)
        assert len(written) >= end, "a frame is cut"
        written = written[end:]
    connection.sending.close()
    assert connection.streams.by_id == {}


def _respond(connection: H2Connection, responds: bool) -> None:
    events, connection.streams.events = connection.streams.events, []
    for event, stream in events:
        if event is StreamEvent.READABLE and stream.is_open:
            stream.message_reader.messages.clear()
            connection.sending.consumed(stream)
            if responds:
                connection.sending.respond(stream, [b"response"], lambda: None)
            else:
                connection.sending.send_trailers(stream, status_trailers(1, "no"))


def grpc_message(octets: bytes) -> None:
    """A ModelInferRequest: the path of large messages finds the inputs that protobuf finds, or refuses them."""
    try:
        large = _as_helper(octets)
    except ServingError:
        large = None
    try:
        plain = _as_protobuf(octets)
    except (ServingError, DecodeError):
        plain = None
    if large is not None and plain is not None:
        assert large == plain, f"{large} and {plain}"
    if large is not None:
        assert plain is not None, "protobuf refuses what the path of large messages takes"


def _as_helper(octets: bytes) -> list[bytes | None]:
    arguments = msgspec.msgpack.encode(DecodeMessageArguments(False))
    steps = decode_message_task(arguments, [memoryview(octets)])
    described = read_description(next(steps))
    memory = memoryview(bytearray(described.byte_size))
    try:
        steps.send(memory)
    except StopIteration as stop:
        sizes = read_sizes(stop.value.message)
    found: list[bytes | None] = []
    position = 0
    for each, most, size in zip(described.inputs, described.byte_sizes, sizes, strict=True):
        found.append(None if each.client_span is not None else bytes(memory[position : position + size]))
        position += -(-most // 64) * 64
    return found


def _as_protobuf(octets: bytes) -> list[bytes | None]:
    message = pb.ModelInferRequest.FromString(octets)
    request = start_request(message, NO_SINK, streaming=False)
    decode_request(message, request)
    return [None if each.client_span is not None else bytes(each.data or b"") for each in request.inputs]


def pbtxt(octets: bytes) -> None:
    """A config.pbtxt: an error of the model, or a configuration that text and JSON give alike."""
    _check(lambda: from_pbtxt(octets, "config.pbtxt"))


def config_json(octets: bytes) -> None:
    """A configuration in JSON, of a load request."""
    _check(lambda: from_json(octets, "failed to load"))


def _check(parse: Callable[[], ModelConfig]) -> None:
    with contextlib.suppress(ServingError):
        config = parse()
        text = text_format.MessageToString(config, as_utf8=True)
        assert from_pbtxt(text.encode(), "again") == config, "what was read is not what is written"
        check_config(config, config.name)
        check_complete(config, NO_GPUS)
        model_spec(config)


def to_kernel(octets: bytes) -> None:
    """What a worker sends: messages, or an error that ends it."""
    _messages(octets, FrameReader(MAX_WORKER_FRAME), wire.to_kernel_decoder)


def to_worker(octets: bytes) -> None:
    """What the kernel sends."""
    _messages(octets, FrameReader(MAX_KERNEL_FRAME), wire.to_worker_decoder)


def _messages(octets: bytes, reader: FrameReader, decoder: msgspec.msgpack.Decoder[Any]) -> None:
    step = octets[0] + 1 if octets else 1
    with contextlib.suppress(ValueError, msgspec.DecodeError):  # what a channel drops its peer for
        for start in range(1, len(octets), step):
            for content in reader.feed(octets[start : start + step]):
                message = decoder.decode(content)
                assert decoder.decode(msgspec.msgpack.encode(message)) is not None


def recording(octets: bytes) -> None:
    """A segment of a recording: its records until the first that is damaged."""
    with contextlib.suppress(*UNREADABLE):
        decode_record(octets)
    with contextlib.suppress(BadRecording):
        reader = SegmentReader(memoryview(octets), "segment")
        end = 0
        for start, content in reader.contents():
            assert start >= end
            end = start + len(content)
            with contextlib.suppress(*UNREADABLE):
                decode_record(content)
        assert 0 <= reader.cut_byte_size <= len(octets)


def forged_entry(octets: bytes) -> bytes:
    """Return an entry with a right checksum: the first byte says how many of `octets` are its head."""
    size = min(octets[0], len(octets) - 1) if octets else 0
    return zlib.crc32(octets[1:]).to_bytes(4, "little") + size.to_bytes(4, "little") + octets[1:]


def cache_entry(octets: bytes) -> None:
    """An entry of a response cache outside of the server: a response that the model could have sent, or a miss."""
    with contextlib.suppress(BadEntry):
        response = decode_entry(forged_entry(octets), {"A": "FP32", "B": "BYTES"})
        assert all(each.name in ("A", "B") for each in response.outputs)


def control_json(octets: bytes) -> None:
    """JSON of control requests: a document, or an error; both readers of it agree on what JSON is."""
    try:
        found = parse(octets)
    except ServingError:
        return
    try:
        again = msgspec.json.decode(octets)
    except (msgspec.DecodeError, RecursionError):
        return  # ours takes what Triton takes, which is more
    assert repr(found) == repr(again), f"{found!r} and {again!r}"


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        http_head, http_json, h2, grpc_message, pbtxt, config_json, control_json, to_kernel, to_worker, recording,
        cache_entry,
    )
}  # fmt: skip
