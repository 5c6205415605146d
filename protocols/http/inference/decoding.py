"""Bodies of /infer to `Request`. Pure: bytes in, Structs out.

A request is a JSON header, behind which the tensors lie that are sent as binary data. One typed decode of
the header leaves tensors in JSON as raw text, to be decoded by datatype. Order of the checks and texts are
Triton's (http_server.cc, ParseJsonTritonIO).

`decode_infer` reads any request, `decode_typed` one in which nothing is unusual. Behind their parts are `check_parts`,
which counts the parts of a large header before objects are made of them, and `decode_raw` for a body that is the
model's only input as a whole.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError, request_prefix
from protocols.http.json.document import (
    ABSENT,
    LARGE_BYTE_SIZE,
    UINT64_MAX,
    UNDECODABLE,
    absent,
    as_array,
    as_bool,
    as_string,
    as_unsigned,
    element_texts,
    made_valid,
    member,
    parse_leniently,
    reads_slowly,
)
from protocols.http.json.large import count_parts
from protocols.http.json.syntax import JsonSyntaxError
from protocols.http.json.tensor import NeedsCare, check_readable, decode_data
from protocols.request_limits import MAX_PARTS, check_count, checked_list
from shm.datatypes import DATATYPES, MAX_SIZE, element_count, encode_strings
from shm.tensor import ClientSpan, RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.request import WantedInference
    from kernel.serving.response import ParameterValue
    from shm.tensor import Buffer

_Read = TypeVar("_Read")

#: Dimensions that an error shows; a client may send millions of them.
_SHOWN_DIMS = 64

#: What Triton calls a datatype that it does not know.
_UNKNOWN_DATATYPE = "<invalid>"


class _Input(msgspec.Struct):
    name: Any = ABSENT
    datatype: Any = ABSENT
    shape: Any = ABSENT
    parameters: Any = ABSENT
    #: Empty if there is none.
    data: msgspec.Raw = msgspec.Raw()


class JsonHeader(msgspec.Struct):
    id: Any = ABSENT
    parameters: Any = ABSENT
    inputs: list[_Input] | msgspec.UnsetType = ABSENT
    outputs: Any = ABSENT


_header_decoder = msgspec.json.Decoder(JsonHeader)


class OutputFormat:
    """Which outputs of a response are to be binary data and not JSON."""

    def __init__(self, *, binary: bool = False) -> None:
        #: For outputs that the request does not name.
        self.binary = binary
        self.named: dict[str, bool] = {}

    @property
    def any_binary(self) -> bool:
        """Whether any output may be binary data."""
        return self.binary or any(self.named.values())

    def is_binary(self, name: str) -> bool:
        return self.named.get(name, self.binary)


# ---- requests -------------------------------------------------------------------------------


#: Returns the raw bytes of an input in JSON, of which it gets name, datatype, text, number of elements, and the most
#: bytes that it may have. Raises `ServingError`.
JsonDataReader = Callable[[str, str, memoryview, int, int], "Buffer"]


def decode_infer(
    header: bytes,
    binary: memoryview,
    request: WantedInference,
    max_input_size: int,
    read_data: JsonDataReader | None = None,
) -> OutputFormat:
    """Fill `request` from its JSON `header` and the `binary` data behind it.

    Inputs keep parts of `binary` as their data. `max_input_size` limits each input in JSON, which `read_data` decodes
    if it is given. Raises `ServingError`; then the request must not be used.
    """
    read_data = read_data or decode_json_data
    try:
        return _fill(_decode_header(header), binary, request, max_input_size, read_data)
    except JsonSyntaxError:
        # The error is in the text of a tensor: parse again, for its position in the header.
        parse_leniently(header)
        raise


def decode_typed(
    header: bytes,
    binary: memoryview,
    request: WantedInference,
    max_input_size: int,
    read_data: JsonDataReader | None = None,
) -> OutputFormat:
    """Do the same for a request in which nothing is wrong or unusual, without reading its numbers twice.

    Raises `NeedsCare` for all others, in much less time than it takes to find out what is wrong; then the request must
    not be used. A text that `read_data` gets may be no JSON; then the request must have numbers.
    """
    try:
        read = _decode_header_apart(header)
        if read is None:
            if read_data is not None:
                raise NeedsCare
            read = _header_decoder.decode(header)
        return _fill(read, binary, request, max_input_size, read_data or _decode_typed_data)
    except (ServingError, *UNDECODABLE):
        raise NeedsCare from None


def _decode_typed_data(name: str, datatype: str, text: Buffer, count: int, max_input_size: int) -> bytes:
    if count == 0:
        raise NeedsCare  # the text may not have been read at all
    return decode_json_data(name, datatype, text, count, max_input_size, typed_only=True)


#: The key of an input's data, and the bracket that begins it.
_DATA = re.compile(rb'"data"[ \t\n\r]*:[ \t\n\r]*\[')

#: Stands for the data in a header. No client writes it so.
_DATA_MARK = b"[\t \t \n]"


def _decode_header_apart(text: bytes) -> JsonHeader | None:
    """Return the header in `text` without having read the numbers of its first input; None if there are none.

    The text of the numbers may be wrong still: it is anything between brackets without strings and objects. If it is a
    JSON array, so is what `_DATA_MARK` stands for, and the rest has been read.
    """
    found = _DATA.search(text)
    if found is None:
        return None
    begin = found.end() - 1
    brace = text.find(b"}", begin)
    quote = text.find(b'"', begin, brace)
    end = text.rfind(b"]", begin, brace if quote < 0 else quote) + 1
    if not end:  # strings, or objects
        return None
    if len(text) - (end - begin) > LARGE_BYTE_SIZE:
        return None
    header = _header_decoder.decode(b"".join((text[:begin], _DATA_MARK, text[end:])))
    if not header.inputs or bytes(header.inputs[0].data) != _DATA_MARK:
        return None  # another member is called data
    header.inputs[0].data = msgspec.Raw(text[begin:end])
    return header


def _decode_header(text: bytes) -> JsonHeader:
    if len(text) > LARGE_BYTE_SIZE:
        check_parts(text)
    if len(text) > LARGE_BYTE_SIZE or not reads_slowly(text):
        with contextlib.suppress(*UNDECODABLE):
            return _header_decoder.decode(text)
    if len(text) > LARGE_BYTE_SIZE:
        try:
            valid = made_valid(text)
            check_parts(valid)
            return _header_decoder.decode(valid)
        except UNDECODABLE:
            pass
    document = parse_leniently(text)
    inputs = member(document, "inputs")
    if isinstance(inputs, list):
        inputs = [_plain_input(each) for each in inputs]
    return JsonHeader(
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


def _fill(
    header: JsonHeader, binary: memoryview, request: WantedInference, max_input_size: int, read_data: JsonDataReader
) -> OutputFormat:
    if header.id is not ABSENT:
        request.id = _read("id", header.id, as_string)
    output_format = OutputFormat()
    if header.parameters is not ABSENT:
        if not isinstance(header.parameters, dict):
            raise InternalError("failed to get request params.: attempt to get members for non-object")
        check_count("parameters", len(header.parameters))
        for key, value in header.parameters.items():
            _set_parameter(request, output_format, key, value)
    position = 0
    for given in checked_list("inputs", _read("inputs", header.inputs, as_array)):
        tensor, position = _decode_input(given, binary, position, request.model_name, max_input_size, read_data)
        request.inputs.append(tensor)
    if position != len(binary):
        raise InvalidArgument(f"unexpected additional input data for model '{request.model_name}'")
    if header.outputs is not ABSENT:
        for document in checked_list("outputs", _read("outputs", header.outputs, as_array)):
            output, is_binary = _decode_output(document)
            request.outputs.append(output)
            output_format.named[output.name] = is_binary
    return output_format


def _read(name: str, value: Any, read: Callable[[Any], _Read], verb: str = "parse") -> _Read:
    """Return what `read` makes of the member `name`, which must be there. Raises `InternalError`."""
    try:
        if value is ABSENT:
            raise absent(name)
        return read(value)
    except InternalError as error:
        raise InternalError(f"Unable to {verb} '{name}': {error.message}") from None


def _set_parameter(request: WantedInference, output_format: OutputFormat, key: str, value: Any) -> None:
    match key:
        case "sequence_id":
            is_number = type(value) is int and 0 <= value <= UINT64_MAX
            request.correlation_id = value if is_number else _read(key, value, as_string)
        case "sequence_start":
            request.sequence_start = _read(key, value, as_bool)
        case "sequence_end":
            request.sequence_end = _read(key, value, as_bool)
        case "priority":
            request.priority = _read(key, value, as_unsigned)
        case "timeout":
            request.timeout_us = _read(key, value, as_unsigned)
        case "binary_data_output":
            output_format.binary = _read(key, value, as_bool)
        case _ if key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        case _:
            request.parameters[key] = custom_parameter(key, value)


def custom_parameter(key: str, value: Any) -> ParameterValue:
    """Return a parameter for the model. Integers beyond 64 bits become floats, as RapidJSON reads them."""
    if not isinstance(value, (bool, int, float, str)):
        raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    if type(value) is int and not -(2**63) <= value <= MAX_SIZE:
        return float(value)
    return value


def _decode_input(
    given: _Input, binary: memoryview, position: int, model: str, max_input_size: int, read_data: JsonDataReader
) -> tuple[Tensor, int]:
    """Return an input, and where in `binary` the next one's bytes begin."""
    parameters = given.parameters if isinstance(given.parameters, dict) else {}
    check_count("parameters of a tensor", len(parameters))
    _check_single_source(bool(given.data), parameters)
    name = _read("name", given.name, as_string)
    datatype = _read("datatype", given.datatype, as_string)
    shape = _read("shape", given.shape, _as_shape)
    count = check_shape(name, datatype, shape)
    tensor = Tensor(name, datatype if datatype in DATATYPES else _UNKNOWN_DATATYPE, shape)
    if "binary_data_size" in parameters:
        end = position + _read("binary_data_size", parameters["binary_data_size"], as_unsigned)
        if end > len(binary):
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {end - len(binary)} additional bytes for "
                f"model '{model}'"
            )
        tensor.data, position = binary[position:end], end
    elif "shared_memory_region" in parameters:
        tensor.client_span = _shared_memory(parameters)
    else:
        tensor.data = read_data(name, datatype, memoryview(given.data), count, max_input_size)
    return tensor, position


def _check_single_source(has_data: bool, parameters: dict[str, Any]) -> None:
    if has_data + ("binary_data_size" in parameters) + ("shared_memory_region" in parameters) == 1:
        return
    in_parameters = [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    found = ["data"] * has_data + in_parameters
    shown = "set " + " ".join(f"'{field}'" for field in found) if found else "no field is set"
    raise InvalidArgument(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {shown}"
    )


def _as_shape(value: Any) -> list[int]:
    return [as_unsigned(dim) for dim in checked_list("dimensions of a shape", as_array(value))]


def check_shape(name: str, datatype: str, shape: list[int]) -> int:
    """Return how many elements a tensor of `shape` has; without dimensions it has none (Triton).

    Raises `InvalidArgument` beyond 64 bits.
    """
    count = 1 if shape else 0
    for dim in shape:
        if dim > MAX_SIZE:
            raise _invalid_shape(name, shape, "contains one or more invalid dimensions")
        count *= dim
        if count > MAX_SIZE:
            raise _invalid_shape(name, shape, f"causes total element count to exceed maximum size of {MAX_SIZE}")
    element_byte_size = DATATYPES[datatype].byte_size if datatype in DATATYPES else 0
    if count * element_byte_size > MAX_SIZE:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': element count ({count}) * data type size "
            f"({element_byte_size}) exceeds maximum allowed size ({MAX_SIZE})"
        )
    return count


def _invalid_shape(name: str, shape: list[int], problem: str) -> InvalidArgument:
    # Dimensions are signed in Triton, and so they are shown.
    shown = ",".join(str(dim if dim <= MAX_SIZE else dim - 2**64) for dim in shape[:_SHOWN_DIMS])
    return InvalidArgument(f"invalid shape for input '{name}': shape [{shown}] {problem}")


def decode_json_data(
    name: str, datatype: str, text: Buffer, count: int, max_input_size: int, *, typed_only: bool = False
) -> bytes:
    """Return the raw bytes of `count` elements in JSON. Nothing is read where there are none (Triton).

    Raises `ServingError`, also where they take more than `max_input_size` bytes.
    """
    if count == 0:
        return b""
    check_readable(name, datatype)
    byte_size = count * DATATYPES[datatype].byte_size
    if byte_size <= max_input_size:
        decoded = decode_data(name, datatype, text, count, typed_only=typed_only)
        byte_size = len(decoded)
        if byte_size <= max_input_size:
            return decoded
    raise json_input_too_large(name, byte_size, max_input_size)


def json_input_too_large(name: str, byte_size: int, max_input_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"JSON input '{name}' has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of "
        f"{max_input_size} bytes. Use --http-max-input-size to increase the limit."
    )


def _shared_memory(parameters: dict[str, Any]) -> ClientSpan:
    region = _read("shared_memory_region", parameters["shared_memory_region"], as_string)
    numbers = {
        key: _read(key, parameters.get(key, 0), as_unsigned)
        for key in ("shared_memory_offset", "shared_memory_byte_size")
    }
    return ClientSpan(region, numbers["shared_memory_byte_size"], numbers["shared_memory_offset"])


def _decode_output(document: Any) -> tuple[RequestedOutput, bool]:
    """Return a requested output, and whether it is to be binary data."""
    given = member(document, "parameters")
    parameters = given if isinstance(given, dict) else {}
    check_count("parameters of a tensor", len(parameters))
    binary = "binary_data" in parameters and _read("binary_data", parameters["binary_data"], as_bool)
    in_region = "shared_memory_region" in parameters
    if in_region and "classification" in parameters:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    if in_region and binary:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    output = RequestedOutput(_read("name", member(document, "name"), as_string))
    if "classification" in parameters:
        output.classification = _read("classification", parameters["classification"], as_unsigned, "set")
    if in_region:
        output.client_span = _shared_memory(parameters)
    return output, binary


# ---- how many parts a header has -------------------------------------------------------------


class _Parts(msgspec.Struct):
    """What may have many parts in a header, and in each of its inputs and outputs. Empty where it is missing."""

    inputs: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()
    shape: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_parts_decoder = msgspec.json.Decoder(_Parts)


def check_parts(header: Buffer) -> None:
    """Raise `InvalidArgument` for too many inputs, outputs, parameters or dimensions.

    Whatever else is wrong with `header` is reported when it is decoded.
    """
    try:
        parts = _parts_decoder.decode(header)
    except UNDECODABLE:
        return
    _check("parameters", parts.parameters)
    for what, tensors in (("inputs", parts.inputs), ("outputs", parts.outputs)):
        _check(what, tensors)
        for tensor in _elements(tensors):
            try:
                of_tensor = _parts_decoder.decode(tensor)
            except UNDECODABLE:
                continue
            _check("dimensions of a shape", of_tensor.shape)
            _check("parameters of a tensor", of_tensor.parameters)


def _check(what: str, text: msgspec.Raw) -> None:
    if bytes(memoryview(text)[:1]) in (b"[", b"{"):
        check_count(what, count_parts(memoryview(text), MAX_PARTS))


def _elements(text: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return element_texts(text)
    except UNDECODABLE:
        return []


# ---- raw requests ----------------------------------------------------------------------------


#: Raw requests cannot have an id.
_PREFIX = request_prefix("")


def decode_raw(body: bytes | bytearray | memoryview, spec: ModelSpec) -> Tensor:
    """Return `body` as the input of the model. A batch has one row. Raises `InvalidArgument`."""
    if len(spec.inputs) != 1:
        raise InvalidArgument(
            f"{_PREFIX}Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} "
            f"inputs in '{spec.name}' model configuration"
        )
    (tensor,) = spec.inputs.values()
    shape = [1, *tensor.dims] if spec.max_batch_size > 0 else list(tensor.dims)
    variable = [place for place, dim in enumerate(shape) if dim == -1]
    if len(variable) > 1:
        raise InvalidArgument(
            f"{_PREFIX}The shape of the raw input '{tensor.name}' can not be deduced because there are more "
            "than one variable-sized dimension"
        )
    if tensor.datatype == "BYTES":
        if variable or element_count(shape) != 1:
            raise InvalidArgument(
                f"{_PREFIX}For BYTE datatype raw input '{tensor.name}', the model must have input shape [1]"
            )
        return Tensor(tensor.name, tensor.datatype, shape, encode_strings([bytes(body)]))
    row_byte_size = DATATYPES[tensor.datatype].byte_size * element_count(d for d in shape if d != -1)
    for place in variable:
        shape[place] = len(body) // row_byte_size
    expected = DATATYPES[tensor.datatype].byte_size * element_count(shape)
    if len(body) != expected:
        raise InvalidArgument(
            f"{_PREFIX}input byte size mismatch for input 'raw_input' for model '{spec.name}'. "
            f"Expected {expected}, got {len(body)}"
        )
    return Tensor(tensor.name, tensor.datatype, shape, body)
