"""RepositoryModelLoadRequest, whose files may be large: they stay where the message was received. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kernel.errors import InvalidArgument
from protocols.grpc.generated.grpc_service_pb2 import RepositoryModelLoadRequest
from protocols.grpc.messages.raw_contents import MAX_LOOP_FIELDS, MessageField, fields_of
from protocols.request_limits import check_count

if TYPE_CHECKING:
    from shm.tensor import Buffer

#: Numbers of the fields: a parameter of a request, its key and value in the map, the bytes in a value.
_PARAMETER, _KEY, _VALUE, _BYTES = 3, 1, 2, 4

#: The fields beside the parameters: the names of the repository and of the model.
_OTHER_FIELDS = 2

#: Parameters up to this size are parsed by protobuf.
_SMALL_BYTE_SIZE = 4096

#: The most bytes of a request without its large files: protobuf copies them in one piece. The configuration has a
#: smaller limit of its own.
_MAX_BYTE_SIZE = 2 << 20


def parse_load_request(message: Buffer) -> tuple[RepositoryModelLoadRequest, dict[str, memoryview]]:
    """Return the request without its large files, and those by their keys, as views of `message`.

    Raises `InvalidArgument` for too many parameters or bytes that are no file, and protobuf's `DecodeError`.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    files: dict[str, memoryview] = {}
    #: How many fields of the rest came before each large file: of parameters with one key the last one counts.
    fields_before: dict[str, int] = {}
    rest_size = 0
    for count, field in enumerate(fields_of(view, MAX_LOOP_FIELDS), 1):
        check_count("parameters", count - _OTHER_FIELDS)
        if field.number == _PARAMETER and field.has_length and field.end - field.start > _SMALL_BYTE_SIZE:
            found = _large_file(view[field.start : field.end])
            if found is not None:
                files[found[0]] = found[1]
                fields_before[found[0]] = len(rest)
                continue
        rest_size += field.end - field.begin
        if rest_size > _MAX_BYTE_SIZE:
            raise InvalidArgument(
                f"the names and parameters of the load request that are no files take more than {_MAX_BYTE_SIZE} bytes"
            )
        rest.append(view[field.begin : field.end])
    request = RepositoryModelLoadRequest.FromString(b"".join(rest))
    for key in files.keys() & request.parameters.keys():
        later = RepositoryModelLoadRequest.FromString(b"".join(rest[fields_before[key] :]))
        if key in later.parameters:
            del files[key]
        else:
            del request.parameters[key]
    return request, files


def _large_file(parameter: memoryview) -> tuple[str, memoryview] | None:
    """Return key and content of a parameter with bytes; None for any other, which protobuf parses."""
    key, value = _single(parameter, _KEY), _single(parameter, _VALUE)
    if key is None or value is None:
        return None
    content = _single(parameter[value.start : value.end], _BYTES)
    if content is None:
        return None
    try:
        name = str(parameter[key.start : key.end], "utf-8")
    except UnicodeDecodeError:
        raise DecodeError("a key that is not UTF-8") from None
    return name, parameter[value.start : value.end][content.start : content.end]


def _single(message: memoryview, number: int) -> MessageField | None:
    """Return the only field with this number, None if there is none, several, or more of them than one of each."""
    found = None
    for index, field in enumerate(fields_of(message, MAX_LOOP_FIELDS)):
        if index > 1:
            return None
        if field.number == number:
            if found is not None or not field.has_length:
                return None
            found = field
    return found
