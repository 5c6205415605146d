"""Bodies of /generate and /generate_stream ⇄ `Request` and `Response`. Pure.

A body is a flat object: members that are inputs of the model become tensors, others its parameters. The
response is flat, too. Rules and texts are Triton's (http_server.cc, GenerateRequestClass).
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError, error_of, request_prefix
from protocols.http.inference.decoding import JsonDataReader, custom_parameter, decode_json_data
from protocols.http.json.document import (
    LARGE_BYTE_SIZE,
    UNDECODABLE,
    as_members,
    as_string,
    element_texts,
    made_valid,
    member_texts,
    parse,
    parse_leniently,
)
from protocols.http.json.large import count_parts
from protocols.http.json.syntax import JsonSyntaxError
from protocols.http.json.tensor import json_values
from protocols.request_limits import MAX_PARTS, check_count
from shm.datatypes import DATATYPES, MAX_SIZE, element_count
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, TensorSpec
    from kernel.serving.request import Request
    from kernel.serving.response import Response

#: The member whose own members are mapped as if they stood beside it.
NESTED = "parameters"

_text_decoder = msgspec.json.Decoder(msgspec.Raw)
_encoder = msgspec.json.Encoder()
_keys_decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: [key for key, _ in pairs])


def decode_generate(
    body: bytes, request: Request, spec: ModelSpec, max_input_size: int, read_data: JsonDataReader = decode_json_data
) -> None:
    """Fill `request` from `body`, of whose inputs `read_data` decodes the elements.

    Raises `ServingError`; then the request must not be used.
    """
    try:
        _fill(body, request, spec, max_input_size, read_data)
    except JsonSyntaxError:
        # The error is in the text of a member: parse again, for its position in the body.
        parse_leniently(body)
        raise


def _fill(
    body: bytes,
    request: Request,
    spec: ModelSpec,
    max_input_size: int,
    read_data: JsonDataReader,
) -> None:
    members = _members(body)
    check_count("members", len(members))
    repeated = _repeated(body, spec.inputs)
    if "id" in members:
        try:
            request.id = as_string(parse(bytes(members["id"])))
        except InternalError as error:
            raise InternalError(f"Unable to parse 'id': {error.message}") from None
    for key, text in members.items():
        if key != NESTED:
            if key in repeated:
                raise _InputRepeated(request, repeated[0])
            _map(key, text, request, spec, max_input_size, read_data)
            continue
        if NESTED in spec.inputs:
            raise InvalidArgument(f"Keyword '{NESTED}' for nested schema also given as input tensor name")
        try:
            nested = _members(bytes(text))
        except InternalError:
            raise InternalError(
                f"Expected JSON object for keyword: '{NESTED}': attempt to access JSON non-object as object"
            ) from None
        check_count("parameters", len(nested))
        try:
            for key_twice in _repeated(bytes(text), spec.inputs):
                raise _InputRepeated(request, key_twice)
            for inner_key, inner_text in nested.items():
                _map(inner_key, inner_text, request, spec, max_input_size, read_data)
        except ServingError as error:
            raise error_of(error.code, f"Converting keyword: '{NESTED}': {error.message}") from None


def _members(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of an object, each as its text. Raises `InternalError` for anything else."""
    if len(text) > LARGE_BYTE_SIZE and _is_valid(text):
        check_count("members", count_parts(text, MAX_PARTS))
    try:
        return member_texts(text)
    except UNDECODABLE:
        if len(text) > LARGE_BYTE_SIZE:
            with contextlib.suppress(*UNDECODABLE):
                return member_texts(made_valid(text))
        document = as_members(parse_leniently(text))
    return {key: msgspec.Raw(json.dumps(value).encode()) for key, value in document.items()}


class _InputRepeated(InvalidArgument):
    def __init__(self, request: Request, name: str) -> None:
        super().__init__(f"{request_prefix(request.id)}input '{name}' already exists in request")


def _repeated(text: bytes, names: Iterable[str]) -> list[str]:
    """Return which of `names` are members of the object `text` more than once; the decoder has kept only the last.

    They are in the order in which a member came for the second time: Triton names the first.
    """
    suspects = [name for name in names if text.count(_encoder.encode(name)) > 1]  # which may be values, or deeper
    if not suspects:
        return suspects
    # Behind the object there may be more, which the parser has not read: a zero ends the text (Triton).
    keys: list[str] = _keys_decoder.raw_decode(made_valid(text).decode(errors="replace").lstrip())[0]
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for key in keys:
        if key in seen and key in suspects:
            twice[key] = None
        seen.add(key)
    return list(twice)


def _map(
    key: str, text: msgspec.Raw, request: Request, spec: ModelSpec, max_input_size: int, read_data: JsonDataReader
) -> None:
    if key in spec.inputs:
        tensor = _decode_input(spec.inputs[key], bytes(text), max_input_size, read_data)
        # Checked here, so that the error says whether it is within `parameters` (Triton).
        if any(given.name == key for given in request.inputs):
            raise _InputRepeated(request, key)
        request.inputs.append(tensor)
    else:
        # No array or object is a parameter, and a large one is not to become objects.
        is_scalar = bytes(memoryview(text)[:1]) not in (b"[", b"{")
        request.parameters[key] = custom_parameter(key, parse(bytes(text)) if is_scalar else [])


def _decode_input(tensor: TensorSpec, text: bytes, max_input_size: int, read_data: JsonDataReader) -> Tensor:
    """Return a scalar or an array as a tensor of the shape that the model wants."""
    count = _outer_count(text)
    shape = fit_shape(tensor.name, tensor.shape, count)
    byte_size = count * DATATYPES[tensor.datatype].byte_size
    if byte_size > max_input_size:
        raise InvalidArgument(
            f"request size of {len(text)} bytes with input '{tensor.name}' of size {byte_size} bytes exceeds the "
            f"maximum allowed input size of {max_input_size}. Use --http-max-input-size to increase the limit."
        )
    if not text.startswith(b"["):
        text = b"[" + text + b"]"
    data = read_data(tensor.name, tensor.datatype, memoryview(text), count, max_input_size)
    return Tensor(tensor.name, tensor.datatype, shape, data)


def _outer_count(text: bytes) -> int:
    """Return how many elements the outermost array has; 1 for anything else."""
    if not text.startswith(b"["):
        return 1
    if len(text) > LARGE_BYTE_SIZE and _is_valid(text):
        return count_parts(text, MAX_SIZE)
    try:
        return len(element_texts(text))
    except UNDECODABLE:
        return len(parse_leniently(text))


def _is_valid(text: bytes) -> bool:
    """Whether `text` is JSON."""
    try:
        _text_decoder.decode(text)
    except UNDECODABLE:
        return False
    return True


def fit_shape(name: str, dims: Iterable[int], count: int) -> list[int]:
    """Return the shape for `count` elements: the innermost variable dimension takes what the fixed ones leave, other
    variable ones are 1. Raises `InvalidArgument` if no such shape has `count` elements."""
    shape = list(dims)
    for dim in reversed(shape):
        if dim != -1:
            count, rest = divmod(count, dim) if dim else (0, 0)
            if rest:
                raise _NoProperShape(name)
    for place in reversed(range(len(shape))):
        if shape[place] == -1:
            shape[place], count = count, 1
    if count != 1:
        raise _NoProperShape(name)
    return shape


class _NoProperShape(InvalidArgument):
    def __init__(self, name: str) -> None:
        super().__init__(f"The schema can not convert input '{name}' to tensor with proper shape")


def encode_generate(response: Response, *, plain_only: bool = False) -> bytes:
    """Encode a response with outputs as one flat object, its members by name; the caller releases it.

    Tensors with one element are scalars, all others flat arrays. Raises `ServingError`, and if `plain_only`,
    `NeedsCare` for NaN and the like.
    """
    members: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        members["id"] = response.id
    members.update(response.parameters or {})
    for output in response.outputs or ():
        count = element_count(output.shape)
        values = json_values(output.name, output.datatype, output.response_bytes() or b"", count, plain_only=plain_only)
        members[output.name] = _scalar(values) if count == 1 else values
    return _encoder.encode(dict(sorted(members.items())))


def _scalar(values: list[Any] | msgspec.Raw) -> Any:
    return msgspec.Raw(bytes(values)[1:-1]) if isinstance(values, msgspec.Raw) else values[0]
