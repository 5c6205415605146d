"""Checks a request against the configuration of its model. The order of the checks and the texts are Triton's. Pure.

Source: `InferenceRequest::Normalize` in core's infer_request.cc. Tensor bytes are not read: the worker checks the
lengths of BYTES elements, because only workers read a client's region.

Inputs are checked in Triton's order, so that errors name the same input. Triton stores inputs in a `std::unordered_map`
by name (infer_request.h). libstdc++ inserts a name before all others if its bucket is empty, else before the names in
its bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidRequest, request_prefix
from shm.datatypes import DATATYPES, MAX_SIZE, element_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.config.spec import ModelSpec, TensorSpec
    from kernel.serving.request import Request
    from shm.tensor import Tensor

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
    "to each input shape. If you want to specify the full shape including the batch dim in your input dims "
    "config, try setting max_batch_size to zero. See the model configuration docs for more info on "
    "max_batch_size."
)


def validate(request: Request, spec: ModelSpec) -> None:
    """Check `request` and set its `batch_size`. Raises `InvalidRequest`."""
    _check_outputs(request, spec)
    _check_count(request, spec)
    try:
        _check_inputs(request, spec, request.inputs)
    except InvalidRequest:
        # The order decides which input the error names, not whether there is an error.
        by_name = {tensor.name: tensor for tensor in request.inputs}
        _check_inputs(request, spec, [by_name[name] for name in triton_input_order(list(by_name))])
        raise


def _check_outputs(request: Request, spec: ModelSpec) -> None:
    seen: set[str] = set()
    for output in request.outputs:
        # Refused by Triton since 2026-04. A step of an ensemble names an output once for each destination.
        if output.name in seen and (request.parent is None or request.parent.composed is None):
            raise InvalidRequest(f"{request_prefix(request.id)}output '{output.name}' already exists in request")
        seen.add(output.name)
        if output.name not in spec.outputs:
            raise InvalidRequest(f"unexpected inference output '{output.name}' for model '{spec.name}'")


def _check_count(request: Request, spec: ModelSpec) -> None:
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise InvalidRequest(f"{request_prefix(request.id)}input '{twice}' already exists in request")
    wrong_count = len(names) != len(spec.inputs)  # usually false: all inputs are given
    if wrong_count and not len(spec.required_inputs) <= len(names) <= len(spec.inputs):
        raise InvalidRequest(_wrong_count(request, spec, names))


def _wrong_count(request: Request, spec: ModelSpec, names: list[str]) -> str:
    most, fewest = len(spec.inputs), len(spec.required_inputs)
    wanted = f"{most} inputs" if most == fewest else f"number of inputs between {fewest} and {most}"
    missing = [name for name, tensor in spec.inputs.items() if not tensor.optional and name not in names]
    given = _quoted(triton_input_order(names))
    opening = "[" if missing else ""  # Triton drops the "[" if the list is empty
    return (
        f"{request_prefix(request.id)}expected {wanted} but got {len(names)} inputs for model '{spec.name}'. "
        f"Got input(s) [{given}], but missing required input(s) {opening}{_quoted(missing)}]. "
        "Please provide all required input(s)."
    )


def _quoted(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _check_inputs(request: Request, spec: ModelSpec, inputs: Sequence[Tensor]) -> None:
    request.batch_size = _batch_size(request, spec, inputs)
    for tensor in inputs:
        _check_tensor(request, spec, tensor, spec.inputs[tensor.name])


def _batch_size(request: Request, spec: ModelSpec, inputs: Sequence[Tensor]) -> int:
    """Return the number of rows: the first dimension of all inputs, or 1 without batching.

    Raises `InvalidRequest`, also for inputs that the model does not have.
    """
    batching = spec.max_batch_size > 0
    rows: int | None = None
    for tensor in inputs:
        if tensor.name not in spec.inputs:
            raise InvalidRequest(f"unexpected inference input '{tensor.name}' for model '{spec.name}'")
        if not batching:
            continue
        if not tensor.shape:
            raise InvalidRequest(
                f"{request_prefix(request.id)}input '{tensor.name}' has no shape but model requires batch dimension "
                f"for '{spec.name}'"
            )
        if rows is None:
            rows = tensor.shape[0]
        elif tensor.shape[0] != rows:
            raise InvalidRequest(
                f"{request_prefix(request.id)}input '{tensor.name}' batch size does not match other inputs for "
                f"'{spec.name}'"
            )
    if rows is None:
        return 1
    if rows > spec.max_batch_size:
        raise InvalidRequest(
            f"{request_prefix(request.id)}inference request batch-size must be <= {spec.max_batch_size} for "
            f"'{spec.name}'"
        )
    return rows


def _check_tensor(request: Request, spec: ModelSpec, tensor: Tensor, expected: TensorSpec) -> None:
    prefix = request_prefix(request.id)
    if tensor.datatype != expected.datatype:
        raise InvalidRequest(
            f"{prefix}inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
            f"'{spec.name}' expects '{expected.datatype}'"
        )
    if -1 in tensor.shape:
        raise InvalidRequest(
            f"{prefix}All input dimensions should be specified for input '{tensor.name}' for model "
            f"'{spec.name}', got {shape_text(tensor.shape)}"
        )
    if not fits(tensor.shape, expected.shape):
        note = _BATCH_NOTE if spec.max_batch_size > 0 else ""
        raise InvalidRequest(
            f"{prefix}unexpected shape for input '{tensor.name}' for model '{spec.name}'. Expected "
            f"{shape_text(expected.shape)}, got {shape_text(tensor.shape)}. {note}"
        )
    element_size = DATATYPES[tensor.datatype].byte_size
    wanted = element_count(tensor.shape) * element_size
    if wanted > MAX_SIZE:
        raise InvalidRequest(f"{prefix}byte size overflow for input '{tensor.name}' for model '{spec.name}'")
    if element_size and tensor.byte_size != wanted:
        raise InvalidRequest(
            f"{prefix}input byte size mismatch for input '{tensor.name}' for model '{spec.name}'. "
            f"Expected {wanted}, got {tensor.byte_size}"
        )


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether `shape` matches `dims`, where -1 stands for any size."""
    if len(shape) != len(dims):
        return False
    # Runs for each input: a loop takes a third of the time of a generator.
    for size, dim in zip(shape, dims):  # noqa: SIM110 - the loop is faster
        if size != dim and (dim != -1 or size < 0):
            return False
    return True


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as Triton prints it: `[-1,16]`."""
    return "[" + ",".join(map(str, shape)) + "]"


#: The bucket counts: a map with at most this many names has this many buckets.
_BUCKET_COUNTS = (13, 29, 59, 127, 257, 541, 1109)

#: The largest total length of names that are put in order: hashing takes microseconds per name, for an error text.
_MAX_LENGTH = 1 << 16

#: The seed of `std::hash<std::string>`, and the multiplier of MurmurHash64A.
_SEED = 0xC70F6907

_FACTOR = 0xC6A4A7935BD1E995

_64_BITS = (1 << 64) - 1


def triton_input_order(names: Sequence[str]) -> list[str]:
    """Return `names`, which are distinct and in the order of the request, in Triton's order.

    More than 1109 names, or very long ones, are returned in the given order: no model has such inputs.
    """
    if len(names) > _BUCKET_COUNTS[-1] or sum(map(len, names)) > _MAX_LENGTH:
        return list(names)
    order: list[str] = []
    for count in _BUCKET_COUNTS:
        if len(order) == len(names):
            break
        # When the map is full it gets more buckets, and all names are inserted again.
        order = _inserted([*order, *names[len(order) : count]], count)
    return order


def _inserted(names: Iterable[str], bucket_count: int) -> list[str]:
    buckets: dict[int, list[str]] = {}
    for name in names:
        buckets.setdefault(_hash(name.encode("utf-8", "surrogatepass")) % bucket_count, []).append(name)
    return [name for bucket in reversed(buckets.values()) for name in reversed(bucket)]


def _hash(data: bytes) -> int:
    """Return libstdc++'s variant of MurmurHash64A, which mixes the last 1 to 7 bytes less."""
    whole = len(data) & ~7
    result = _SEED ^ (len(data) * _FACTOR & _64_BITS)
    for start in range(0, whole, 8):
        word = int.from_bytes(data[start : start + 8], "little")
        result = (result ^ _mixed(word * _FACTOR & _64_BITS) * _FACTOR & _64_BITS) * _FACTOR & _64_BITS
    if whole < len(data):
        result = (result ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _64_BITS
    return _mixed(_mixed(result) * _FACTOR & _64_BITS)


def _mixed(value: int) -> int:
    return value ^ (value >> 47)
