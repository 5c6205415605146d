"""Bodies of /infer ⇄ `Request` and `Response`. Pure: bytes in, Structs out, and back.

A request is a JSON header, behind which the tensors lie that are sent as binary data. One typed decode of
the header leaves tensors in JSON as raw text, to be decoded by datatype. Order of the checks and texts are
Triton's (http_server.cc, ParseJsonTritonIO).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from kernel.request import InputTensor, RequestedOutput, SharedMemoryRef
from protocols.http.json_document import (
    ABSENT,
    UINT64_MAX,
    absent,
    as_array,
    as_bool,
    as_string,
    as_unsigned,
    member,
    parse_leniently,
)
from protocols.http.json_syntax import JsonSyntaxError
from protocols.http.json_tensor import check_readable, decode_data, json_values
from shm.datatypes import DATATYPES, MAX_SIZE, element_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.request import Buffer, ParameterValue, Request
    from kernel.response import OutputTensor, Response

#: What Triton makes of a datatype that it does not know.
_UNKNOWN_DATATYPE = "<invalid>"


class _Input(msgspec.Struct):
    name: Any = ABSENT
    datatype: Any = ABSENT
    shape: Any = ABSENT
    parameters: Any = ABSENT
    #: Empty where there is none.
    data: msgspec.Raw = msgspec.Raw()


class _Header(msgspec.Struct):
    id: Any = ABSENT
    parameters: Any = ABSENT
    inputs: list[_Input] | msgspec.UnsetType = ABSENT
    outputs: Any = ABSENT


_header_decoder = msgspec.json.Decoder(_Header)


class OutputForm:
    """Which outputs of a response are to be binary data and not JSON."""

    def __init__(self, *, binary: bool = False) -> None:
        #: For outputs that the request does not name.
        self.binary = binary
        self.named: dict[str, bool] = {}

    def is_binary(self, name: str) -> bool:
        return self.named.get(name, self.binary)


# ---- requests -------------------------------------------------------------------------------


def decode_infer(header: bytes, binary: memoryview, request: Request, max_input_size: int) -> OutputForm:
    """Fill `request` from its JSON `header` and the `binary` data behind it.

    Inputs keep parts of `binary` as their data. `max_input_size` limits each input in JSON. Raises
    `ServingError`; the request is of no use then.
    """
    try:
        return _fill(_decode_header(header), binary, request, max_input_size)
    except JsonSyntaxError:
        # In a tensor's own text: once more, for the place in the whole of it.
        parse_leniently(header)
        raise


def _decode_header(text: bytes) -> _Header:
    try:
        return _header_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    document = parse_leniently(text)
    inputs = member(document, "inputs")
    if inputs is not ABSENT:
        inputs = [_plain_input(each) for each in _prefixed("Unable to parse 'inputs'", as_array, inputs)]
    return _Header(
        id=member(document, "id"),
        parameters=member(document, "parameters"),
        inputs=inputs,
        outputs=member(document, "outputs"),
    )


def _plain_input(document: Any) -> _Input:
    data = member(document, "data")
    return _Input(
        name=member(document, "name"),
        datatype=member(document, "datatype"),
        shape=member(document, "shape"),
        parameters=member(document, "parameters"),
        data=msgspec.Raw() if data is ABSENT else msgspec.Raw(json.dumps(data).encode()),
    )


def _fill(header: _Header, binary: memoryview, request: Request, max_input_size: int) -> OutputForm:
    if header.id is not ABSENT:
        request.id = _prefixed("Unable to parse 'id'", as_string, header.id)
    form = OutputForm()
    if header.parameters is not ABSENT:
        if not isinstance(header.parameters, dict):
            raise InternalError("failed to get request params.: attempt to get members for non-object")
        for key, value in header.parameters.items():
            _set_parameter(request, form, key, value)
    if header.inputs is ABSENT:
        raise InternalError(f"Unable to parse 'inputs': {absent('inputs').message}")
    position = 0
    for given in header.inputs:
        tensor, position = _decode_input(given, binary, position, request.model_name, max_input_size)
        request.inputs.append(tensor)
    if position != len(binary):
        raise InvalidArgument(f"unexpected additional input data for model '{request.model_name}'")
    if header.outputs is not ABSENT:
        for document in _prefixed("Unable to parse 'outputs'", as_array, header.outputs):
            output, is_binary = _decode_output(document)
            request.outputs.append(output)
            form.named[output.name] = is_binary
    return form


def _prefixed[Read](prefix: str, read: Callable[[Any], Read], value: Any) -> Read:
    """Return `read(value)`, with `prefix` in front of the text of its error."""
    if value is ABSENT:
        raise InternalError(f"{prefix}: {value}")
    try:
        return read(value)
    except InternalError as error:
        raise InternalError(f"{prefix}: {error.message}") from None
