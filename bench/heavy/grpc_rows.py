"""The rows over gRPC: what of an inference message can be long, deep or many, its transfer, and all other RPCs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

from bench.heavy import messages as wire
from bench.heavy.attack import MIB, Attack, GrpcCall, HeavyRow
from protocols.grpc.generated import grpc_service_pb2 as pb

#: Makes a message of about as many bytes as its argument says.
MakeMessage = Callable[[int], bytes]

SERVICE = "/inference.GRPCInferenceService/"

_INFER, _STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"

_INVALID, _UNPARSED = "INVALID_ARGUMENT", "Unable to parse request"

_TOO_LONG = "the names, shapes and parameters of the request take"


def grpc_infer_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [*_contents(), *_parts(), *_long_texts(), *_unknown(), *_transfers(), *_streams(), *_memory()]


def grpc_row(
    name: str,
    message: MakeMessage,
    status: str = "OK",
    text: str = "",
    *,
    path: str = _INFER,
    encoding: str = "",
    calls: int = 1,
    times: int = 1,
    attackers: int = 1,
) -> HeavyRow:
    """Return a row with a number of calls at once, each with a message that is sent `times`."""

    def build(byte_size: int) -> Attack:
        content = message(byte_size // (calls * times))
        return Attack([GrpcCall(path, [content] * times, encoding)] * calls)

    return HeavyRow(f"grpc {name}", "grpc", build, status, text, attackers)


# ---- contents of tensors -------------------------------------------------------------------------


def _typed(model: str, datatype: str, field: bytes, count: int) -> bytes:
    """Return a message with `count` elements in typed contents."""
    return wire.infer_message(model, wire.infer_input(datatype, [count], wire.contents(field)))


def _each(model: str, datatype: str, field: bytes, count: int = 0) -> MakeMessage:
    """Return what makes a message with `field` again and again: one element each, not packed. `count` is the shape."""

    def make(byte_size: int) -> bytes:
        fields = wire.repeated(field, byte_size)
        return _typed(model, datatype, fields, count or len(fields) // len(field))

    return make


_EMPTY_STRING = wire.delimited(wire.BYTES, b"")

_empty_strings = _each("text", "BYTES", _EMPTY_STRING)


def _packed_ints(byte_size: int) -> bytes:
    count, field = wire.packed_ints(byte_size)
    return _typed("int32", "INT32", field, count)


def _packed_floats(byte_size: int) -> bytes:
    count, field = wire.packed_floats(byte_size)
    return _typed("fp32", "FP32", field, count)


def _packed_bools(byte_size: int) -> bytes:
    return _typed("bool", "BOOL", wire.delimited(wire.BOOLS, b"\1" * byte_size), byte_size)


def _long_bools(byte_size: int) -> bytes:
    field = wire.repeated(wire.delimited(wire.BOOLS, b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\1" * 10), byte_size)
    return _typed("bool", "BOOL", field, len(field) // 102 * 10)


def _in_parts(count: int) -> MakeMessage:
    """Return what makes a message with the field `contents` again and again, each with `count` numbers.

    Protobuf merges them.
    """
    part = wire.contents(wire.delimited(wire.INTS, b"\5" * count))

    def make(byte_size: int) -> bytes:
        parts = wire.repeated(part, byte_size)
        shape = [len(parts) // len(part) * count]
        return wire.infer_message("int32", wire.infer_input("INT32", shape, parts))

    return make


def _contents() -> list[HeavyRow]:
    row = grpc_row
    count, kind = "unexpected number of string elements", "unexpected explicit tensor data"
    return [
        row("4 million empty strings, 8 MiB", lambda n: _empty_strings(n * 8 // 60)),
        row("empty strings", lambda n: _empty_strings(n // 4)),
        row("empty strings, shape [1]", _each("text", "BYTES", _EMPTY_STRING, 1), _INVALID, count),
        row("empty strings for FP32", _each("fp32", "FP32", _EMPTY_STRING), _INVALID, kind),
        row("short strings", lambda n: _each("text", "BYTES", wire.delimited(wire.BYTES, b"abc"))(n // 2)),
        row("one string", lambda n: _typed("text", "BYTES", wire.delimited(wire.BYTES, bytes(n)), 1)),
        row("int_contents, 16 MiB", lambda n: _packed_ints(n * 16 // 60)),
        row("int_contents", _packed_ints),
        row("int_contents, one by one", _each("int32", "INT32", b"\x10\x05")),
        row("int_contents in packs of one", _each("int32", "INT32", b"\x12\x01\x05")),
        row("int_contents for BYTES", _each("text", "BYTES", b"\x10\x05"), _INVALID, kind),
        row("negative int_contents", _each("int32", "INT32", b"\x10" + b"\xff" * 9 + b"\1")),
        row("fp32_contents", _packed_floats),
        row("fp32_contents, one by one", _each("fp32", "FP32", b"\x35" + bytes(4))),
        row("bool_contents", _packed_bools),
        row("bool_contents of ten bytes each", _long_bools),
        row("contents in parts of 100", _in_parts(100)),
        row("contents in parts of 1", lambda n: _in_parts(1)(n // 4)),
    ]


# ---- other parts of a request --------------------------------------------------------------------

_RAW_STRING = wire.raw_contents(b"\1\0\0\0a")

_ONE = wire.infer_input("BYTES", [1])

_INT_PARAMETER = b"\x10\x01"


def _with(part: MakeMessage) -> MakeMessage:
    """Return what makes a request that is right but for `part`."""
    return lambda n: wire.infer_message("text", _ONE + _RAW_STRING, part(n))


def _in_input(part: MakeMessage) -> MakeMessage:
    """The same for a part of its input, which has no shape yet."""
    return lambda n: wire.infer_message("text", wire.infer_input("BYTES", [], part(n)), _RAW_STRING)


def _input(field: MakeMessage) -> MakeMessage:
    """Return what makes a request with this input."""
    return lambda n: wire.infer_message("text", field(n), _RAW_STRING)


def _again(field: bytes) -> MakeMessage:
    return lambda n: wire.repeated(field, n)


def _parameters_of_input(byte_size: int) -> bytes:
    return wire.infer_input("BYTES", [1], wire.map_entries(4, _INT_PARAMETER, byte_size))


_parameters = _with(lambda n: wire.map_entries(4, _INT_PARAMETER, n))


def _parts() -> list[HeavyRow]:
    def row(name: str, message: MakeMessage, text: str) -> HeavyRow:
        return grpc_row(name, message, _INVALID, text)

    parameters, dims = "parameters, expected at most", f"dimensions of a shape, expected at most|{_TOO_LONG}"
    inputs, outputs = "inputs, expected at most", "outputs, expected at most"

    return [
        row("300,000 parameters", lambda n: _parameters(n // 12), parameters),
        row("parameters", _parameters, parameters),
        row("empty parameters", _with(_again(wire.delimited(4, b""))), parameters),
        row("parameters of the input", _input(_parameters_of_input), _TOO_LONG),
        row("inputs", lambda n: wire.infer_message("text", wire.repeated(_ONE + _RAW_STRING, n)), inputs),
        row("empty inputs", _with(_again(wire.delimited(5, b""))), inputs),
        row("outputs", _with(_again(wire.delimited(6, wire.delimited(1, b"OUTPUT0")))), outputs),
        row("empty outputs", _with(_again(wire.delimited(6, b""))), outputs),
        row("raw contents", _with(_again(wire.raw_contents(b"a"))), "raw input contents, expected at most"),
        row("empty raw contents", _with(_again(wire.raw_contents(b""))), "raw input contents, expected at most"),
        row("dims of a shape", _in_input(lambda n: wire.delimited(3, b"\1" * n)), dims),
        row("dims of a shape, one by one", _in_input(_again(b"\x18\x01")), dims),
    ]


def _long_texts() -> list[HeavyRow]:
    def row(name: str, message: MakeMessage, status: str = _INVALID, text: str = _TOO_LONG) -> HeavyRow:
        return grpc_row(f"long {name}", message, status, text)

    def parameter(byte_size: int) -> bytes:
        value = wire.delimited(3, b"a" * byte_size)
        return wire.delimited(4, wire.delimited(1, b"a") + wire.delimited(2, value))

    return [
        row("model name", lambda n: wire.infer_message("a" * n, _ONE + _RAW_STRING)),
        row("version", _with(lambda n: wire.delimited(2, b"1" * n))),
        row("id", _with(lambda n: wire.delimited(3, b"a" * n))),
        row("id without UTF-8", _with(lambda n: wire.delimited(3, b"\xff" * n))),
        row("parameter", _with(parameter)),
        row("input name", _input(lambda n: wire.infer_input("BYTES", [1], name="a" * n))),
        row("output name", _with(lambda n: wire.delimited(6, wire.delimited(1, b"a" * n)))),
        row("datatype", _input(lambda n: wire.infer_input("A" * n, [1]))),
    ]


def _unknown() -> list[HeavyRow]:
    def tag(kind: int) -> bytes:
        return wire.tag(wire.UNKNOWN, kind)

    def raw(model: str, datatype: str, width: int) -> MakeMessage:
        def make(byte_size: int) -> bytes:
            count = byte_size // width
            content = wire.floats(count) if datatype == "FP32" else bytes(count * width)
            return wire.infer_message(model, wire.infer_input(datatype, [count]), wire.raw_contents(content))

        return make

    row = grpc_row
    groups = tag(wire.START_GROUP) + tag(wire.END_GROUP)
    return [
        row("unknown numbers", _with(_again(tag(wire.VARINT) + b"\1")), _INVALID, _TOO_LONG),
        row("unknown fields", _with(_again(wire.delimited(wire.UNKNOWN, b""))), _INVALID, _TOO_LONG),
        row("one unknown field", _with(lambda n: wire.delimited(wire.UNKNOWN, bytes(n))), _INVALID, _TOO_LONG),
        row("unknown groups", _with(_again(groups)), _INVALID, _TOO_LONG),
        row("nested groups", _with(wire.nested_groups), "INTERNAL", _UNPARSED),
        row("model name again and again", _again(wire.delimited(1, b"a")), "NOT_FOUND", "unknown model"),
        row("no such model", raw("missing", "UINT8", 1), "NOT_FOUND", "unknown model"),
        row("raw floats", raw("fp32", "FP32", 4)),
        row("raw empty strings", lambda n: raw("text", "BYTES", 4)(n // 4)),
        row("no protobuf", lambda n: b"\xff" * n, "INTERNAL", _UNPARSED),
        row("no protobuf at the end", lambda n: _empty_strings(n) + b"\xff", "INTERNAL", _UNPARSED),
    ]


# ---- compression, streams ------------------------------------------------------------------------


def _zeros(byte_size: int) -> bytes:
    return wire.infer_message("text", wire.raw_contents(bytes(byte_size)))


def _zipped(message: MakeMessage) -> MakeMessage:
    return lambda n: gzip.compress(message(n), 9)


def _deflated(byte_size: int) -> bytes:
    return zlib.compress(_empty_strings(byte_size), 9)


def _transfers() -> list[HeavyRow]:
    row = grpc_row
    bomb = "become more than"
    zeros = _zipped(lambda n: _zeros(max(n, 80 * MIB)))
    return [
        row("gzip bomb of strings", _zipped(_empty_strings), "RESOURCE_EXHAUSTED", bomb, encoding="gzip"),
        row("deflate bomb of strings", _deflated, "RESOURCE_EXHAUSTED", bomb, encoding="deflate"),
        row("gzip bomb of zeros", zeros, "RESOURCE_EXHAUSTED", bomb, encoding="gzip"),
        row("gzip in gzip", _zipped(zeros), "INTERNAL", _UNPARSED, encoding="gzip"),
        row("gzip of zeros", lambda n: b"\x1f\x8b" + bytes(n), "INTERNAL", "unable to decompress", encoding="gzip"),
        row("ten calls at once", _packed_floats, calls=10),
        row("a hundred calls, parameters", _parameters, _INVALID, "parameters, expected at most", calls=100),
    ]


def _streams() -> list[HeavyRow]:
    def row(name: str, message: MakeMessage, status: str = "OK", text: str = "", times: int = 1) -> HeavyRow:
        encoding = "gzip" if "gzip" in name else ""
        return grpc_row(f"stream: {name}", message, status, text, path=_STREAM, times=times, encoding=encoding)

    parameters = "parameters, expected at most"
    return [
        row("empty strings", lambda n: _empty_strings(n // 4)),
        row("parameters", _parameters, text=parameters),
        row("ten messages", _packed_floats, times=10),
        row("ten messages, parameters", _parameters, text=parameters, times=10),
        row("100,000 small messages", lambda _: wire.infer_message("text", _ONE + _RAW_STRING), times=100_000),
        row("no protobuf", lambda n: b"\xff" * n, "INTERNAL", _UNPARSED),
        row(
            "no such model", lambda n: wire.infer_message("missing", wire.raw_contents(bytes(n))), text="unknown model"
        ),
        row("gzip bomb", _zipped(_empty_strings), "RESOURCE_EXHAUSTED", "become more than"),
    ]


# ---- memory --------------------------------------------------------------------------------------


def _echo(byte_size: int) -> GrpcCall:
    tensor = wire.infer_input("UINT8", [byte_size])
    return GrpcCall(_INFER, [wire.infer_message("uint8", tensor, wire.raw_contents(bytes(byte_size)))])


def _memory() -> list[HeavyRow]:
    def row(name: str, build: Callable[[int], Attack]) -> HeavyRow:
        status = "OK|OK+RESOURCE_EXHAUSTED"
        return HeavyRow(f"grpc {name}", "grpc", build, status, exceeds_budget=True)

    def unread(byte_size: int) -> GrpcCall:
        return _echo(byte_size * 16 // 60)

    def half(byte_size: int) -> GrpcCall:
        return _echo(byte_size // 3)

    parameters = "parameters, expected at most"
    return [
        row("30 unread responses", lambda n: Attack([unread(n)], connections=30, pauses_before_reading=True)),
        row("30 unread on one connection", lambda n: Attack([unread(n)] * 30, pauses_before_reading=True)),
        row("20 half-sent", lambda n: Attack([half(n)], connections=20, pauses_before_end=True)),
        row("20 half-sent on one connection", lambda n: Attack([half(n)] * 20, pauses_before_end=True)),
        grpc_row("four attackers, floats", lambda n: _packed_floats(n // 2), attackers=4),
        grpc_row("four attackers, parameters", _parameters, _INVALID, parameters, attackers=4),
    ]


_SPARE = pb.RepositoryModelLoadRequest(model_name="spare").SerializeToString()

_UNKNOWN_FIELD = wire.tag(wire.UNKNOWN, wire.VARINT) + b"\1"

#: RPCs whose first field is a name.
WITH_NAME = (
    "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad",
    "RepositoryModelUnload", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
)  # fmt: skip

#: RPCs without.
WITHOUT_NAME = ("ServerLive", "ServerReady", "ServerMetadata", "LogSettings", "TraceSetting")

#: Other services.
OTHERS = (
    "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)  # fmt: skip

#: The usual status and text, and what some rows get.
_REFUSED = ("RESOURCE_EXHAUSTED", "larger than max")

_FAILED, _MANY = "failed to load 'spare'", "expected at most"

_NO_FILES = "that are no files take more than"

EXPECTED = {
    "RepositoryModelLoad: long name": ("INVALID_ARGUMENT", _NO_FILES),
    "RepositoryModelLoad: a configuration": ("INVALID_ARGUMENT", _NO_FILES),
    "RepositoryModelLoad: several configurations": ("INVALID_ARGUMENT", _NO_FILES),
    "RepositoryModelLoad: unknown fields": ("INVALID_ARGUMENT", _MANY),
    "RepositoryModelLoad: a file": ("INTERNAL", _FAILED),
    "RepositoryModelLoad: many files": ("INVALID_ARGUMENT", _MANY),
    "RepositoryModelLoad: parameters": ("INVALID_ARGUMENT", _MANY),
    "NoSuchRpc: a message": ("UNIMPLEMENTED", "Method not found"),
}


def grpc_rpc_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    found = [_row("long name", each, lambda n: wire.delimited(1, b"a" * n)) for each in WITH_NAME]
    others = (*WITHOUT_NAME, *OTHERS)
    found += [_row("unknown fields", each, lambda n: wire.repeated(_UNKNOWN_FIELD, n)) for each in others]
    return [*found, *_control(), _row("a message", "NoSuchRpc", bytes)]


def _row(name: str, rpc: str, message: MakeMessage) -> HeavyRow:
    title = f"{rpc.lstrip('/').replace('grpc.', '').replace('/', ' ') if '/' in rpc else rpc}: {name}"
    path = rpc if rpc.startswith("/") else SERVICE + rpc
    return grpc_row(title, message, *EXPECTED.get(title, _REFUSED), path=path)


def _control() -> list[HeavyRow]:
    def load(key: bytes, value: bytes) -> bytes:
        return _SPARE + wire.delimited(3, wire.delimited(1, key) + wire.delimited(2, value))

    def file(byte_size: int) -> bytes:
        return load(b"file:1/a", wire.delimited(4, bytes(byte_size)))

    def configurations(byte_size: int) -> bytes:
        value = wire.delimited(2, wire.delimited(3, b"a" * (byte_size // 100)))
        return _SPARE + b"".join(wire.delimited(3, wire.delimited(1, b"%d" % each) + value) for each in range(100))

    def values(byte_size: int) -> bytes:
        setting = wire.delimited(2, wire.repeated(wire.delimited(1, b""), byte_size))
        return wire.delimited(1, wire.delimited(1, b"trace_level") + setting)

    def long_second_field(byte_size: int) -> bytes:
        return wire.delimited(1, b"a") + wire.delimited(2, b"a" * byte_size)

    def half_sent(byte_size: int) -> Attack:
        call = GrpcCall(SERVICE + "RepositoryModelLoad", [file(byte_size // 3)])
        return Attack([call], connections=20, pauses_before_end=True)

    number, files = b"\x10\x01", wire.delimited(4, b"")
    return [
        _row("a configuration", "RepositoryModelLoad", lambda n: load(b"config", wire.delimited(3, b"a" * n))),
        _row("several configurations", "RepositoryModelLoad", configurations),
        _row("unknown fields", "RepositoryModelLoad", lambda n: _SPARE + wire.repeated(_UNKNOWN_FIELD, n)),
        _row("a file", "RepositoryModelLoad", file),
        _row("many files", "RepositoryModelLoad", lambda n: _SPARE + wire.map_entries(3, files, n, b"file:1/")),
        _row("parameters", "RepositoryModelLoad", lambda n: _SPARE + wire.map_entries(3, number, n)),
        _row("parameters", "RepositoryModelUnload", lambda n: _SPARE + wire.map_entries(3, number, n)),
        _row("settings", "TraceSetting", lambda n: wire.map_entries(1, wire.delimited(1, b"1"), n)),
        _row("values of one setting", "TraceSetting", values),
        _row("settings", "LogSettings", lambda n: wire.map_entries(1, wire.delimited(3, b"1"), n)),
        _row("long key", "SystemSharedMemoryRegister", long_second_field),
        _row("long handle", "CudaSharedMemoryRegister", long_second_field),
        HeavyRow(
            "grpc 20 half-sent, load", "grpc", half_sent, "INTERNAL|INTERNAL+RESOURCE_EXHAUSTED",
            exceeds_budget=True,
        ),
    ]  # fmt: skip
