"""The rows of every other RPC."""

from __future__ import annotations

from bench.heavy.attack import Attack, GrpcCall, HeavyRow
from bench.heavy.rows import messages as wire
from bench.heavy.rows.grpc_inference import SERVICE, MakeMessage, grpc_row
from protocols.grpc.generated import grpc_service_pb2 as pb

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

#: The usual status and text, and those of some rows.
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
