"""Inference messages of gRPC to requests, and responses to messages. Pure.

The order of checks and the texts are Triton's (`SetInferenceRequestMetadata`, `InferGRPCToInput`,
`InferAllocatorPayload` in infer_handler.cc and grpc_utils.h), so that of several mistakes the same one is reported.
Typed contents of tensors stand first: their numbers are packed in the machine's order, which is the wire's
(little-endian).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from kernel.serving.request import Request, WantedInference
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from protocols.grpc.grpclib_internals import clean
from protocols.grpc.wire_format import split_raw_contents, varint
from protocols.request_limits import MAX_BODY_BYTE_SIZE, check_count
from shm.datatypes import DATATYPES, encode_strings
from shm.tensor import ClientSpan, RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.serving.response import ParameterValue, Response, Sink
    from protocols.grpc.generated.grpc_service_pb2 import InferParameter, ModelStreamInferResponse
    from shm.tensor import Buffer


class ContentsField(msgspec.Struct, frozen=True):
    """One repeated field: the datatype it stands for, smaller ones that it also carries, its array type."""

    datatype: str
    narrower: tuple[str, ...] = ()
    #: Type code of `array.array`; empty for BYTES.
    typecode: str = ""


_FIELDS: dict[int, ContentsField] = {
    InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER: ContentsField("BOOL", typecode="B"),
    InferTensorContents.INT_CONTENTS_FIELD_NUMBER: ContentsField("INT32", ("INT8", "INT16"), "i"),
    InferTensorContents.INT64_CONTENTS_FIELD_NUMBER: ContentsField("INT64", typecode="q"),
    InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: ContentsField("UINT32", ("UINT8", "UINT16"), "I"),
    InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER: ContentsField("UINT64", typecode="Q"),
    InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: ContentsField("FP32", typecode="f"),
    InferTensorContents.FP64_CONTENTS_FIELD_NUMBER: ContentsField("FP64", typecode="d"),
    InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER: ContentsField("BYTES"),
}


class FoundContents(msgspec.Struct, frozen=True):
    """The elements of an input, checked against its datatype."""

    field: ContentsField
    values: Any
    datatype: str


#: How many strings become objects at a time.
_STRINGS_AT_A_TIME = 16384


def pack_contents(contents: InferTensorContents, datatype: str, tensor: str, model: str) -> bytes:
    """Return the elements of `contents` as a tensor of `datatype`; without elements no bytes.

    How many elements there are is not checked here. `tensor` and `model` are for the error texts.
    Raises `InvalidArgument` if a field does not fit `datatype` or more than one is set.
    """
    found = check_contents(contents, datatype, tensor, model)
    if found is None:
        return b""
    if found.field.typecode:
        return _pack_numbers(found.values, found.field.typecode, datatype)
    return encode_strings(found.values)


def check_contents(contents: InferTensorContents, datatype: str, tensor: str, model: str) -> FoundContents | None:
    """Return the elements of the field that is set; None if none is. Raises as `pack_contents`."""
    found: FoundContents | None = None
    for descriptor, values in contents.ListFields():  # set fields only, by number: Triton's order
        if found is not None:
            raise InvalidArgument(several_contents(tensor, model))
        found = FoundContents(check_field(descriptor.number, datatype, tensor, model), values, datatype)
    return found


def check_field(number: int, datatype: str, tensor: str, model: str) -> ContentsField:
    """Return the field `number` of contents. Raises `InvalidArgument` if it does not fit `datatype`."""
    field = _FIELDS[number]
    if datatype != field.datatype and datatype not in field.narrower:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}' of type "
            f"'{field.datatype}', expected datatype '{datatype}'"
        )
    return field


def several_contents(tensor: str, model: str) -> str:
    """Return the error of an input for which several fields of its contents are set."""
    return (
        f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}', "
        "binary data was already supplied."
    )


def packed_size(contents: InferTensorContents, found: FoundContents) -> int:
    """Return the most bytes that the elements become.

    A string of n bytes takes n + 2 in a message, with its tag and length, or more, and n + 4 raw bytes.
    """
    if found.field.typecode:
        return len(found.values) * DATATYPES[found.datatype].byte_size
    return contents.ByteSize() * 2


def write_contents(found: FoundContents, memory: memoryview) -> int:
    """Write the raw bytes of the elements to `memory`, strings in pieces, and return how many they are."""
    values = found.values
    if found.field.typecode:
        packed = _pack_numbers(values, found.field.typecode, found.datatype)
        memory[: len(packed)] = packed
        return len(packed)
    position = 0
    for start in range(0, len(values), _STRINGS_AT_A_TIME):
        packed = encode_strings(values[start : start + _STRINGS_AT_A_TIME])
        memory[position : position + len(packed)] = packed
        position += len(packed)
    return position


def _pack_numbers(values: Iterable[Any], typecode: str, datatype: str) -> bytes:
    wide: array[Any] = array(typecode, values)
    narrow = DATATYPES[datatype]
    if narrow.byte_size == wide.itemsize:
        return wide.tobytes()
    # Triton casts without a bound check: the low bytes of every element stay.
    parts: array[Any] = array(narrow.typecode, wide.tobytes())
    return parts[:: wide.itemsize // narrow.byte_size].tobytes()


FINAL_RESPONSE = "triton_final_response"

_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_UINT64_MASK = 2**64 - 1

#: Parameters that are fields of the request, in a message field of this type.
_FIELD_TYPES = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    _EMPTY_FINAL_RESPONSE: ("bool_param",),
}


#: From here on the tensors of a message stay where they were received, and what is left may not have more bytes:
#: parsing it takes up to 1 us a byte.
_LARGE_BYTE_SIZE = 8 * 2**10

#: The tags of `ModelStreamInferResponse.infer_response`, field 2, and of `ModelInferResponse.id` and
#: `raw_output_contents`, fields 3 and 6, all with a length.
_INFER_RESPONSE_TAG = b"\x12"

_ID_TAG = b"\x1a"

_RAW_OUTPUT_TAG = b"\x32"


# ---- requests -------------------------------------------------------------------------------


def parse_soon(message: Buffer) -> tuple[ModelInferRequest, Sequence[Buffer]] | None:
    """Return a request message and its raw contents, which for large messages are views of `message`.

    None for a message that takes too long to be parsed on the event loop. Raises protobuf's `DecodeError`.
    """
    if len(message) < _LARGE_BYTE_SIZE:
        parsed = ModelInferRequest.FromString(bytes(message))
        return parsed, parsed.raw_input_contents
    split = split_raw_contents(message, _LARGE_BYTE_SIZE)
    if split is None:
        return None
    return ModelInferRequest.FromString(split[0]), split[1]


def start_request(message: ModelInferRequest, sink: Sink, *, streaming: bool) -> Request:
    """Return a request with the names and the id of `message`, to be filled by `decode_request`."""
    return Request(
        message.model_name,
        [],
        sink,
        model_version=message.model_version,
        id=message.id,
        streaming=streaming,
    )


#: Returns the raw bytes of an input from its typed contents, of which it also gets datatype, name and model. Raises
#: `InvalidArgument`.
ContentsReader = Callable[[InferTensorContents, str, str, str], "Buffer"]


def decode_request(
    message: ModelInferRequest,
    request: Request,
    raw_contents: Sequence[Buffer] | None = None,
    read_contents: ContentsReader = pack_contents,
) -> bool:
    """Fill `request` from `message`. Raises `InvalidArgument`.

    `raw_contents` are those that `parse_soon` took out of the message.
    Returns whether the client asked for an empty final response of a decoupled model.
    """
    for what, count in (
        ("parameters", len(message.parameters)),
        ("inputs", len(message.inputs)),
        ("outputs", len(message.outputs)),
    ):
        check_count(what, count)
    wants_empty_final = False
    for key, parameter in sorted(message.parameters.items()):
        if key == _EMPTY_FINAL_RESPONSE:
            _check_type(key, parameter)
            wants_empty_final = parameter.bool_param
        elif key in _FIELD_TYPES:
            _check_type(key, parameter)
            _set_field(request, key, parameter)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
                f"keys starting with 'triton_' are allowed: {_EMPTY_FINAL_RESPONSE}"
            )
        else:
            request.parameters[key] = _custom_value(key, parameter)
    raw = message.raw_input_contents if raw_contents is None else raw_contents
    _decode_inputs(message, raw, request.inputs, read_contents)
    request.outputs = [_decode_output(output) for output in message.outputs]
    return wants_empty_final


def _check_type(key: str, parameter: InferParameter) -> None:
    accepted = _FIELD_TYPES[key]
    if parameter.WhichOneof("parameter_choice") not in accepted:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {' or '.join(accepted)}.")


def _set_field(request: WantedInference, key: str, parameter: InferParameter) -> None:
    """Set the field of `request` that the parameter `key` means. Triton casts signed to unsigned."""
    choice = parameter.WhichOneof("parameter_choice")
    if key == "sequence_id":
        as_text = choice == "string_param"
        request.correlation_id = parameter.string_param if as_text else parameter.int64_param & _UINT64_MASK
    elif key == "sequence_start":
        request.sequence_start = parameter.bool_param
    elif key == "sequence_end":
        request.sequence_end = parameter.bool_param
    elif key == "timeout":
        request.timeout_us = parameter.int64_param & _UINT64_MASK
    else:
        priority = parameter.int64_param if choice == "int64_param" else parameter.uint64_param
        if priority < 0:
            raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
        request.priority = priority


def _custom_value(key: str, parameter: InferParameter) -> ParameterValue:
    match parameter.WhichOneof("parameter_choice"):
        case "bool_param":
            return parameter.bool_param
        case "int64_param":
            return parameter.int64_param
        case "string_param":
            return parameter.string_param
        case "double_param":
            return parameter.double_param
    raise InvalidArgument(
        f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
    )


def _decode_inputs(
    message: ModelInferRequest, raw: Sequence[Buffer], inputs: list[Tensor], read_contents: ContentsReader
) -> None:
    """Append the inputs; raw contents belong to those with neither shared memory nor typed contents."""
    model = message.model_name
    raw_contents = iter(raw)
    has_raw = len(raw) > 0
    for tensor in message.inputs:
        name = tensor.name
        check_count("dimensions of a shape", len(tensor.shape))
        # Triton turns a name that it does not know into this one.
        datatype = tensor.datatype if tensor.datatype in DATATYPES else "<invalid>"
        found = Tensor(name, datatype, list(tensor.shape))
        inputs.append(found)
        found.client_span = _shared_memory(name, tensor.parameters)
        has_contents = tensor.HasField("contents")
        if found.client_span is not None:
            if has_contents:
                raise InvalidArgument(
                    f"unexpected 'content' provided when using shared memory for input tensor '{name}' for "
                    f"model '{model}'"
                )
        elif has_contents:
            if has_raw:
                raise InvalidArgument(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for "
                    f"model '{model}'"
                )
            found.data = read_contents(tensor.contents, datatype, name, model)
        else:
            found.data = next(raw_contents, None)
            if found.data is None:
                raise InvalidArgument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")


def _decode_output(output: ModelInferRequest.InferRequestedOutputTensor) -> RequestedOutput:
    found = RequestedOutput(output.name, client_span=_shared_memory(output.name, output.parameters))
    # A map of messages grows when it is asked by [] for a key that it does not have.
    if "classification" in output.parameters:
        parameter = output.parameters["classification"]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
        if parameter.int64_param <= 0:
            raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
        if found.client_span is not None:
            raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
        found.classification = parameter.int64_param
    return found


def _shared_memory(tensor: str, parameters: Mapping[str, InferParameter]) -> ClientSpan | None:
    """Return the byte range that a tensor's parameters name, None if they name none."""
    if not parameters:  # usual
        return None
    has_region = "shared_memory_region" in parameters
    if has_region and not parameters["shared_memory_region"].HasField("string_param"):
        raise InvalidArgument(
            f"invalid value type for 'shared_memory_region' parameter for tensor '{tensor}', expected string_param."
        )
    numbers = {"shared_memory_offset": 0, "shared_memory_byte_size": 0}
    for key in numbers:
        if key not in parameters:
            continue
        if not has_region:
            raise InvalidArgument(
                f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
            )
        if not parameters[key].HasField("int64_param"):
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter for tensor '{tensor}', expected int64_param."
            )
        numbers[key] = parameters[key].int64_param & _UINT64_MASK
    if not has_region:
        return None
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for "
            f"tensor '{tensor}'"
        )
    region = parameters["shared_memory_region"].string_param
    return ClientSpan(region, numbers["shared_memory_byte_size"], numbers["shared_memory_offset"])


# ---- responses ------------------------------------------------------------------------------


def encode_response(response: Response, message: ModelInferResponse) -> None:
    """Write a response with outputs into `message`; the caller releases the response afterwards.

    Outputs always travel as raw contents, one entry each, an empty one where the tensor is in the
    client's region. Raises `ServingError` for what gRPC cannot carry; `message` is of no use then.
    """
    _encode_fields(response, message)
    for output in response.outputs or ():
        message.raw_output_contents.append(bytes(output.response_bytes() or b""))


def response_parts(response: Response) -> list[Buffer]:
    """Return the encoded `ModelInferResponse` in parts, the outputs as they are, not copied.

    The caller releases the response when it is done with the parts. Raises as `encode_response`.
    """
    outputs = response.outputs or ()
    fields, byte_size = [_model_fields(response.model_name, response.model_version)], 0
    if response.id:
        fields.append(_text_field(_ID_TAG, response.id))
    if response.parameters:
        message = ModelInferResponse()
        for key, value in response.parameters.items():
            _encode_parameter(key, value, message.parameters[key])
        fields.append(message.SerializeToString())
    contents: list[Buffer] = []
    for output in outputs:
        fields.append(_output_field(output.name, output.datatype, *output.shape))
        data = output.data
        if data is None:
            data = output.response_bytes() or b""
        byte_size += len(data)
        contents += (_content_begin(len(data)), data)
    if byte_size > MAX_BODY_BYTE_SIZE:
        _check_byte_size(byte_size)
    return fields + contents


def _final_field(final: bool) -> bytes:
    message = ModelInferResponse()
    message.parameters[FINAL_RESPONSE].bool_param = final
    return message.SerializeToString()


_FINAL_FIELDS = {final: _final_field(final) for final in (False, True)}


def stream_response_parts(response: Response) -> list[Buffer]:
    """Return the encoded message of a stream for a response with outputs, with its final flag. As `response_parts`."""
    parts = [*response_parts(response), _FINAL_FIELDS[response.final]]
    return [_INFER_RESPONSE_TAG + varint(sum(map(len, parts))), *parts]


@functools.lru_cache(maxsize=256)
def _model_fields(name: str, version: str) -> bytes:
    return ModelInferResponse(model_name=name, model_version=version).SerializeToString()


@functools.lru_cache(maxsize=1024)
def _output_field(name: str, datatype: str, *shape: int) -> bytes:
    message = ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


@functools.lru_cache(maxsize=256)
def _content_begin(byte_size: int) -> bytes:
    return _RAW_OUTPUT_TAG + varint(byte_size)


def _text_field(tag: bytes, text: str) -> bytes:
    octets = text.encode()
    if len(octets) < 0x80:  # a varint of one byte
        return tag + bytes((len(octets),)) + octets
    return tag + varint(len(octets)) + octets


def _check_byte_size(byte_size: int) -> None:
    if byte_size > MAX_BODY_BYTE_SIZE:
        raise InvalidArgument(
            f"Response has byte size {byte_size} which exceeds gRPC's byte size limit {MAX_BODY_BYTE_SIZE}."
        )


def _encode_fields(response: Response, message: ModelInferResponse) -> None:
    """Write everything but the raw contents into `message`."""
    outputs = response.outputs or ()
    _check_byte_size(sum(_data_byte_size(output) for output in outputs))
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.id
    for key, value in (response.parameters or {}).items():
        _encode_parameter(key, value, message.parameters[key])
    for output in outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)


def encode_stream_end(request: Request, message: ModelStreamInferResponse) -> None:
    """Write that no more responses of `request` will come."""
    _name_request(request, message.infer_response)
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = True


def encode_stream_error(request: Request, text: str, message: ModelStreamInferResponse, *, final: bool | None) -> None:
    """Write an error of `request`. A request that was refused has no response that could be `final`: None."""
    message.error_message = clean(text)
    if final is None:
        message.infer_response.id = request.id
    else:
        _name_request(request, message.infer_response)
        message.infer_response.parameters[FINAL_RESPONSE].bool_param = final


def _name_request(request: Request, message: ModelInferResponse) -> None:
    message.id = request.id
    message.model_name = request.model_name
    message.model_version = request.model_version  # as the client gave it


def _data_byte_size(output: Tensor) -> int:
    return len(output.response_bytes() or b"")


def _encode_parameter(key: str, value: ParameterValue, parameter: InferParameter) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int() if -(2**63) <= value < 2**63:
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
        case _:
            raise InternalError(f"response parameter '{key}' does not fit into an int64_param")
