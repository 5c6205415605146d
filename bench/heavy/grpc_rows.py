"""The rows over gRPC: every RPC that takes a long message, and every part of one that can be long, deep or many."""

from __future__ import annotations

import functools
import gzip
import zlib
from typing import TYPE_CHECKING

from bench.heavy import messages as wire
from bench.heavy.attack import MIB, Attack, GrpcCall, HeavyRow
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

_SERVICE = "/inference.GRPCInferenceService/"
_INFER, _STREAM = _SERVICE + "ModelInfer", _SERVICE + "ModelStreamInfer"

#: A map entry `InferParameter`: a string, and an int64.
_TEXT_PARAMETER, _INT_PARAMETER = wire.delimited(3, b"a"), b"\x10\x01"
#: An empty message or string in the field with this number.
_EMPTY_BYTES = wire.delimited(wire.BYTES, b"")


def grpc_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [*_contents(), *_parts(), *_transfers(), *_streams(), *_other_rpcs(), *_memory()]


def _row(
    name: str,
    message: Callable[[int], bytes],
    status: str,
    text: str = "",
    *,
    path: str = _INFER,
    encoding: str = "",
    calls: int = 1,
    times: int = 1,
    attackers: int = 1,
) -> HeavyRow:
    def build(byte_size: int) -> Attack:
        content = message(byte_size // (calls * times))
        return Attack([GrpcCall(path, [content] * times, encoding)] * calls)

    return HeavyRow(f"grpc {name}", "grpc", build, status, text, attackers)


# ---- contents of tensors -------------------------------------------------------------------------


def _empty_strings(byte_size: int) -> bytes:
    field = wire.repeated(_EMPTY_BYTES, byte_size)
    return wire.infer_message("text", wire.infer_input("BYTES", [len(field) // 2], wire.contents(field)))


def _typed(model: str, datatype: str, field: bytes, count: int) -> bytes:
    return wire.infer_message(model, wire.infer_input(datatype, [count], wire.contents(field)))


def _each(model: str, datatype: str, field: bytes, byte_size: int, shape: int = 0) -> bytes:
    """Return a message with `field` again and again: one element each, not packed."""
    fields = wire.repeated(field, byte_size)
    return _typed(model, datatype, fields, shape or len(fields) // len(field))


def _contents() -> list[HeavyRow]:
    row = _row

    def packed_ints(byte_size: int) -> bytes:
        count, field = wire.packed_ints(byte_size)
        return _typed("int32", "INT32", field, count)

    def packed_floats(byte_size: int) -> bytes:
        count, field = wire.packed_floats(byte_size)
        return _typed("fp32", "FP32", field, count)

    def bools(byte_size: int) -> bytes:
        return _typed("bool", "BOOL", wire.delimited(wire.BOOLS, b"\1" * byte_size), byte_size)

    long_bools = wire.delimited(wire.BOOLS, b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\1" * 10)
    return [
        row("4 million empty strings, 8 MiB", lambda n: _empty_strings(n * 8 // 60), "OK"),
        row("empty strings", _empty_strings, "OK"),
        row("empty strings, shape [1]", functools.partial(_each, "text", "BYTES", _EMPTY_BYTES, shape=1), "INVALID_ARGUMENT"),
        row("empty strings for FP32", functools.partial(_each, "fp32", "FP32", _EMPTY_BYTES), "INVALID_ARGUMENT"),
        row("short strings", functools.partial(_each, "text", "BYTES", wire.delimited(wire.BYTES, b"abc")), "OK"),
        row("one string", lambda n: _typed("text", "BYTES", wire.delimited(wire.BYTES, bytes(n)), 1), "OK"),
        row("int_contents, 16 MiB", lambda n: packed_ints(n * 16 // 60), "OK"),
        row("int_contents", packed_ints, "OK"),
        row("int_contents, one by one", functools.partial(_each, "int32", "INT32", b"\x10\x05"), "OK"),
        row("int_contents in packs of one", functools.partial(_each, "int32", "INT32", b"\x12\x01\x05"), "OK"),
        row("int_contents for BYTES", functools.partial(_each, "text", "BYTES", b"\x10\x05"), "INVALID_ARGUMENT"),
        row("negative int_contents", functools.partial(_each, "int32", "INT32", b"\x10" + b"\xff" * 9 + b"\1"), "OK"),
        row("fp32_contents", packed_floats, "OK"),
        row("fp32_contents, one by one", functools.partial(_each, "fp32", "FP32", b"\x35" + bytes(4)), "OK"),
        row("bool_contents", bools, "OK"),
        row("bool_contents of ten bytes each", lambda n: _typed("bool", "BOOL", wire.repeated(long_bools, n), n // len(long_bools) * 10), "OK"),
        row("contents in parts", functools.partial(_parts_of_contents, b"\x10\x05"), "OK"),
    ]  # fmt: skip


def _parts_of_contents(field: bytes, byte_size: int) -> bytes:
    """The field `contents` again and again: protobuf merges them."""
    parts = wire.repeated(wire.contents(field), byte_size)
    count = len(parts) // len(wire.contents(field))
    return wire.infer_message("int32", wire.infer_input("INT32", [count], parts))


# ---- other parts of a request --------------------------------------------------------------------

_ONE = wire.infer_input("BYTES", [1]) + wire.raw_contents(b"\1\0\0\0a")


def _with(part: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return a builder of requests that are right but for `part`."""
    return lambda n: wire.infer_message("text", _ONE, part(n))


def _parts() -> list[HeavyRow]:
    row, wrong = _row, "INVALID_ARGUMENT"
    shape = functools.partial(wire.delimited, 3)

    def in_input(part: Callable[[int], bytes]) -> Callable[[int], bytes]:
        return lambda n: wire.infer_message("text", wire.infer_input("BYTES", [], part(n)), wire.raw_contents(b"\1\0\0\0a"))

    def raw_floats(byte_size: int) -> bytes:
        count = byte_size // 4
        return wire.infer_message("fp32", wire.infer_input("FP32", [count]), wire.raw_contents(wire.floats(count)))

    def raw_strings(byte_size: int) -> bytes:
        return wire.infer_message("text", wire.infer_input("BYTES", [byte_size // 4]), wire.raw_contents(bytes(byte_size // 4 * 4)))

    return [
        row("300,000 parameters", _with(lambda n: wire.map_entries(4, _INT_PARAMETER, n // 12)), wrong),
        row("parameters", _with(lambda n: wire.map_entries(4, _INT_PARAMETER, n)), wrong),
        row("empty parameters", _with(lambda n: wire.repeated(wire.delimited(4, b""), n)), wrong),
        row("parameters of the input", in_input(lambda n: wire.map_entries(4, _TEXT_PARAMETER, n)), wrong),
        row("one long parameter", _with(lambda n: wire.delimited(4, wire.delimited(1, b"a") + wire.delimited(2, wire.delimited(3, b"a" * n)))), wrong),
        row("inputs", lambda n: wire.infer_message("text", wire.repeated(_ONE, n)), wrong),
        row("empty inputs", _with(lambda n: wire.repeated(wire.delimited(5, b""), n)), wrong),
        row("outputs", _with(lambda n: wire.repeated(wire.delimited(6, wire.delimited(1, b"OUTPUT0")), n)), wrong),
        row("empty outputs", _with(lambda n: wire.repeated(wire.delimited(6, b""), n)), wrong),
        row("raw contents", _with(lambda n: wire.repeated(wire.raw_contents(b"a"), n)), wrong),
        row("empty raw contents", _with(lambda n: wire.repeated(wire.raw_contents(b""), n)), wrong),
        row("dims of a shape", in_input(lambda n: shape(b"\1" * n)), wrong),
        row("dims of a shape, one by one", in_input(lambda n: wire.repeated(b"\x18\x01", n)), wrong),
        row("unknown numbers", _with(lambda n: wire.repeated(wire.tag(wire.UNKNOWN, wire.VARINT) + b"\1", n)), "OK|INVALID_ARGUMENT"),
        row("unknown fields", _with(lambda n: wire.repeated(wire.delimited(wire.UNKNOWN, b""), n)), "OK|INVALID_ARGUMENT"),
        row("one unknown field", _with(lambda n: wire.delimited(wire.UNKNOWN, bytes(n))), "OK|INVALID_ARGUMENT"),
        row("unknown groups", _with(lambda n: wire.repeated(wire.tag(wire.UNKNOWN, wire.START_GROUP) + wire.tag(wire.UNKNOWN, wire.END_GROUP), n)), "OK|INVALID_ARGUMENT"),
        row("nested groups", _with(wire.nested_groups), "INTERNAL|INVALID_ARGUMENT"),
        row("long model name", lambda n: wire.infer_message("a" * n, _ONE), "NOT_FOUND|INVALID_ARGUMENT"),
        row("model name again and again", lambda n: wire.repeated(wire.delimited(1, b"a"), n), "NOT_FOUND|INVALID_ARGUMENT"),
        row("long version", _with(lambda n: wire.delimited(2, b"1" * n)), wrong),
        row("long id", _with(lambda n: wire.delimited(3, b"a" * n)), wrong),
        row("id without UTF-8", _with(lambda n: wire.delimited(3, b"\xff" * n)), "INTERNAL|INVALID_ARGUMENT"),
        row("long input name", lambda n: wire.infer_message("text", wire.infer_input("BYTES", [1], name="a" * n)), wrong),
        row("long output name", _with(lambda n: wire.delimited(6, wire.delimited(1, b"a" * n))), wrong),
        row("long datatype", lambda n: wire.infer_message("text", wire.infer_input("A" * n, [1])), wrong),
        row("no such model", lambda n: wire.infer_message("missing", wire.raw_contents(bytes(n))), "NOT_FOUND|INVALID_ARGUMENT"),
        row("raw floats", raw_floats, "OK"),
        row("raw empty strings", raw_strings, "OK"),
        row("no protobuf", lambda n: b"\xff" * n, "INTERNAL"),
        row("no protobuf after 60 MiB", lambda n: _empty_strings(n) + b"\xff", "INTERNAL"),
    ]  # fmt: skip


# ---- compression, streams ------------------------------------------------------------------------


def _transfers() -> list[HeavyRow]:
    row = _row
    refused = "INVALID_ARGUMENT|RESOURCE_EXHAUSTED"

    def zeros(byte_size: int) -> bytes:
        return wire.infer_message("text", wire.raw_contents(bytes(byte_size)))

    return [
        row("gzip bomb of empty strings", lambda n: gzip.compress(_empty_strings(n), 9), refused, encoding="gzip"),
        row("deflate bomb of empty strings", lambda n: zlib.compress(_empty_strings(n), 9), refused, encoding="deflate"),
        row("gzip bomb of zeros", lambda n: gzip.compress(zeros(16 * n), 9), refused, encoding="gzip"),
        row("gzip in gzip", lambda n: gzip.compress(gzip.compress(zeros(16 * n), 9), 9), "INTERNAL|INVALID_ARGUMENT", encoding="gzip"),
        row("gzip of garbage", lambda n: b"\x1f\x8b" + bytes(n), "INTERNAL|INVALID_ARGUMENT", encoding="gzip"),
        row("ten calls at once", _empty_strings, "OK", calls=10),
        row("a hundred calls of 300,000 parameters", lambda n: _with(lambda m: wire.map_entries(4, _INT_PARAMETER, m))(n), "INVALID_ARGUMENT", calls=100),
    ]  # fmt: skip


def _streams() -> list[HeavyRow]:
    row = functools.partial(_row, path=_STREAM)
    parameters = _with(lambda n: wire.map_entries(4, _INT_PARAMETER, n))
    return [
        row("stream: empty strings", _empty_strings, "OK"),
        row("stream: parameters", parameters, "OK", "inputs|parameters"),
        row("stream: ten messages", _empty_strings, "OK", times=10),
        row("stream: ten messages of parameters", parameters, "OK", "parameters", times=10),
        row("stream: 100,000 small messages", lambda n: wire.infer_message("text", _ONE), "OK", times=100_000),
        row("stream: no protobuf", lambda n: b"\xff" * n, "INTERNAL|INVALID_ARGUMENT"),
        row("stream: no such model", lambda n: wire.infer_message("missing", wire.raw_contents(bytes(n))), "OK"),
        row("stream: gzip bomb", lambda n: gzip.compress(_empty_strings(n), 9), "INVALID_ARGUMENT|RESOURCE_EXHAUSTED", encoding="gzip"),
    ]  # fmt: skip


# ---- other RPCs ----------------------------------------------------------------------------------


def _other_rpcs() -> list[HeavyRow]:
    def row(name: str, rpc: str, message: Callable[[int], bytes], status: str) -> HeavyRow:
        path = rpc if rpc.startswith("/") else _SERVICE + rpc
        return _row(f"{rpc.rpartition('/')[2]}: {name}", message, status, path=path)

    def load(model: str, key: bytes, value: bytes) -> bytes:
        entry = wire.delimited(3, wire.delimited(1, key) + wire.delimited(2, value))
        return pb.RepositoryModelLoadRequest(model_name=model).SerializeToString() + entry

    def settings(value: bytes, byte_size: int) -> bytes:
        return wire.map_entries(1, value, byte_size)

    refused = "INVALID_ARGUMENT|RESOURCE_EXHAUSTED|NOT_FOUND"
    model = pb.RepositoryModelLoadRequest(model_name="text").SerializeToString()
    found = [
        row("a configuration", "RepositoryModelLoad", lambda n: load("text", b"config", wire.delimited(3, b"a" * n)), refused),
        row("a file", "RepositoryModelLoad", lambda n: load("text", b"file:1/a", wire.delimited(4, bytes(n))), refused),
        row("parameters", "RepositoryModelLoad", lambda n: model + wire.map_entries(3, _INT_PARAMETER, n), refused),
        row("parameters", "RepositoryModelUnload", lambda n: model + wire.map_entries(3, _INT_PARAMETER, n), refused),
        row("settings", "TraceSetting", functools.partial(settings, wire.delimited(1, b"1")), refused),
        row("values of one setting", "TraceSetting", lambda n: wire.delimited(1, wire.delimited(1, b"trace_level") + wire.delimited(2, wire.repeated(b"\x0a\x00", n))), refused),
        row("settings", "LogSettings", functools.partial(settings, wire.delimited(3, b"1")), refused),
        row("long key", "SystemSharedMemoryRegister", lambda n: wire.delimited(1, b"a") + wire.delimited(2, b"a" * n), refused),
        row("long handle", "CudaSharedMemoryRegister", lambda n: wire.delimited(1, b"a") + wire.delimited(2, b"a" * n), refused),
        row("files", "RepositoryModelLoad", lambda n: model + wire.numbered(b"\x1a\x13\x0a\x0dfile:1", b"\x12\x02\x22\x00", n), refused),
    ]  # fmt: skip
    names = (
        "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex",
        "SystemSharedMemoryStatus", "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryUnregister",
    )  # fmt: skip
    found += [row("long name", each, lambda n: wire.delimited(1, b"a" * n), f"OK|{refused}") for each in names]
    unknown = wire.tag(wire.UNKNOWN, wire.VARINT) + b"\1"
    found += [
        row("unknown fields", each, functools.partial(wire.repeated, unknown), "OK|RESOURCE_EXHAUSTED")
        for each in ("ServerLive", "ServerReady", "ServerMetadata", "LogSettings", "/grpc.health.v1.Health/Check")
    ]
    found.append(row("a message", "NoSuchRpc", bytes, "UNIMPLEMENTED"))
    return found


# ---- memory --------------------------------------------------------------------------------------


def _memory() -> list[HeavyRow]:
    def echo(byte_size: int) -> GrpcCall:
        tensor = wire.infer_input("UINT8", [byte_size])
        return GrpcCall(_INFER, [wire.infer_message("uint8", tensor, wire.raw_contents(bytes(byte_size)))])

    def unread(byte_size: int) -> Attack:
        return Attack([echo(byte_size * 16 // 60)], connections=30, pauses_before_reading=True)

    def unread_on_one(byte_size: int) -> Attack:
        return Attack([echo(byte_size * 16 // 60)] * 30, pauses_before_reading=True)

    def half_sent(byte_size: int) -> Attack:
        return Attack([echo(byte_size // 3)], connections=20, pauses_before_end=True)

    def half_sent_on_one(byte_size: int) -> Attack:
        return Attack([echo(byte_size // 3)] * 20, pauses_before_end=True)

    def half_sent_load(byte_size: int) -> Attack:
        message = pb.RepositoryModelLoadRequest(model_name="text").SerializeToString()
        entry = wire.delimited(3, wire.delimited(1, b"file:1/a") + wire.delimited(2, wire.delimited(4, bytes(byte_size // 3))))
        return Attack([GrpcCall(_SERVICE + "RepositoryModelLoad", [message + entry])], connections=20, pauses_before_end=True)

    def row(name: str, build: Callable[[int], Attack], status: str, attackers: int = 1) -> HeavyRow:
        return HeavyRow(f"grpc {name}", "grpc", build, status, attackers=attackers)

    return [
        row("30 unread responses", unread, "OK+RESOURCE_EXHAUSTED"),
        row("30 unread responses, one connection", unread_on_one, "OK+RESOURCE_EXHAUSTED"),
        row("20 half-sent", half_sent, "OK+RESOURCE_EXHAUSTED"),
        row("20 half-sent, one connection", half_sent_on_one, "OK+RESOURCE_EXHAUSTED"),
        row("20 half-sent, load", half_sent_load, "INVALID_ARGUMENT+RESOURCE_EXHAUSTED"),
        row("four attackers, empty strings", lambda n: Attack([GrpcCall(_INFER, [_empty_strings(n)])]), "OK", 4),
        row("four attackers, parameters", lambda n: Attack([GrpcCall(_INFER, [_with(lambda m: wire.map_entries(4, _INT_PARAMETER, m))(n)])]), "INVALID_ARGUMENT", 4),
    ]  # fmt: skip


def rpcs() -> set[str]:
    """Return the paths that rows attack, for a test that no RPC is left out."""
    return {each.path for row in grpc_rows() for each in row.build(MIB // 64).requests}
