"""Compares the outputs of two versions for one request. Pure; a helper runs it, because NumPy is not for the kernel.

An output is compared in this order: whether it is there, its datatype, its shape, its values. The distance of numbers
is the largest `|a - b| / (absolute + relative * |a|)`, where `a` is an element of the version that the client has its
response of: up to 1 they are equal. NaN equals NaN, infinities are equal by their signs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.serving.helper_tasks import TaskResult
from kernel.traffic.settings import OutputRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps

#: The name of the function.
COMPARE = "traffic.compare"

#: Datatype → relative and absolute tolerance. Other datatypes must be equal.
TOLERANCES = {"FP64": (1e-6, 1e-9), "FP32": (1e-4, 1e-5), "FP16": (1e-2, 1e-3), "BF16": (3e-2, 1e-2)}

#: How many elements are compared at a time, so that a large tensor takes little memory.
_PIECE = 1 << 20

_DEFAULT = OutputRule()


class ComparedSide(msgspec.Struct, array_like=True, gc=False):
    """An output of one side."""

    name: str
    datatype: str
    shape: list[int]
    #: The bytes in the form of the protocols; None if source number `source` of the task has them.
    data: bytes | None = None
    source: int = 0
    #: Whether it has the best classes in place of a tensor, as `score:index:label`.
    classes: bool = False


class CompareArguments(msgspec.Struct, array_like=True):
    """Compare the outputs of two responses."""

    first: list[ComparedSide]
    second: list[ComparedSide]
    rules: dict[str, OutputRule]


class OutputDifference(msgspec.Struct, array_like=True, frozen=True):
    """What was found for one output."""

    name: str
    #: `missing`, `datatype`, `shape` or `values`; empty if it is equal within its tolerance.
    kind: str = ""
    #: In tolerances. 0 where bytes are equal, infinite where no distance says how far values are from each other.
    distance: float = 0.0
    #: What differs, for people.
    text: str = ""


encode_arguments = msgspec.msgpack.Encoder().encode

decode_result = msgspec.msgpack.Decoder(list[OutputDifference]).decode

_decode_arguments = msgspec.msgpack.Decoder(CompareArguments).decode


def compare_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Compare two responses."""
    yield from ()  # a task function is a generator, and this one needs no memory
    wanted = _decode_arguments(arguments)
    first = [(each, _bytes(each, sources)) for each in wanted.first]
    second = [(each, _bytes(each, sources)) for each in wanted.second]
    return TaskResult(encode_arguments(compare_outputs(first, second, wanted.rules)))


def _bytes(side: ComparedSide, sources: Sequence[memoryview]) -> bytes | memoryview:
    return sources[side.source] if side.data is None else side.data


#: An output and its bytes.
Side = tuple[ComparedSide, bytes | memoryview]


def compare_outputs(
    first: Sequence[Side], second: Sequence[Side], rules: dict[str, OutputRule]
) -> list[OutputDifference]:
    """Return what differs, with an entry for each output that is not ignored."""
    others = {side.name: (side, data) for side, data in second}
    found = []
    for side, data in first:
        other = others.pop(side.name, None)
        rule = rules.get(side.name, _DEFAULT)
        if rule.compare != "ignore":
            found.append(_compare(side, data, other, rule))
    more = [name for name in others if rules.get(name, _DEFAULT).compare != "ignore"]
    return [*found, *(OutputDifference(name, "missing", math.inf, "only the shadow has it") for name in more)]


def _compare(side: ComparedSide, data: bytes | memoryview, other: Side | None, rule: OutputRule) -> OutputDifference:
    if other is None:
        return OutputDifference(side.name, "missing", math.inf, "the shadow does not have it")
    its, its_data = other
    if side.datatype != its.datatype:
        return OutputDifference(side.name, "datatype", math.inf, f"{side.datatype} and {its.datatype}")
    if side.shape != its.shape:
        return OutputDifference(side.name, "shape", math.inf, f"{side.shape} and {its.shape}")
    if data == its_data:
        return OutputDifference(side.name)
    try:
        distance, text = _distance(side, data, its_data, rule)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return OutputDifference(side.name, "values", math.inf, f"other bytes, which cannot be read: {error}")
    return OutputDifference(side.name, "values" if distance > 1 else "", distance, text if distance > 1 else "")


def _distance(
    side: ComparedSide, data: bytes | memoryview, its: bytes | memoryview, rule: OutputRule
) -> tuple[float, str]:
    """Return the distance of the values in tolerances, and what differs most. Raises ValueError for wrong bytes."""
    if rule.compare == "exact":
        return math.inf, "other bytes"
    if side.datatype == "BYTES":
        return _distance_of_classes(data, its, rule) if side.classes else _distance_of_texts(data, its)
    relative, absolute = TOLERANCES.get(side.datatype, (0.0, 0.0))
    relative = relative if rule.relative is None else rule.relative
    absolute = absolute if rule.absolute is None else rule.absolute
    a, b = (_numbers(side.datatype, part) for part in (data, its))
    if math.prod(side.shape) != len(a) or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} elements for the shape {side.shape}")
    if rule.compare == "close":
        return _distance_of_numbers(a, b, relative, absolute)
    width = side.shape[-1] if side.shape else 1
    rows = (a.reshape(-1, width), b.reshape(-1, width))
    return _distance_of_order(*rows, 1 if rule.compare == "top1" else rule.top, relative, absolute)


def _numbers(datatype: str, data: bytes | memoryview) -> Any:
    """Return a flat array of the elements. Raises ValueError, and KeyError for an unknown datatype."""
    import numpy as np  # only helpers compare

    from shm.arrays import to_array

    if datatype == "BF16":  # the upper half of an FP32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return to_array(datatype, [-1], data)


def _distance_of_numbers(a: Any, b: Any, relative: float, absolute: float) -> tuple[float, str]:
    largest, place = 0.0, 0
    for begin in range(0, len(a), _PIECE):
        distances = _distances(a[begin : begin + _PIECE], b[begin : begin + _PIECE], relative, absolute)
        found = int(distances.argmax())
        if distances[found] > largest:
            largest, place = float(distances[found]), begin + found
    return largest, f"element {place} is {b[place]}, and {a[place]} with the version that the client has"


def _distances(a: Any, b: Any, relative: float, absolute: float) -> Any:
    """Return the distance of each element in tolerances: infinite where one side is NaN, or infinities differ."""
    import numpy as np

    if a.dtype.kind in "iub" and not relative and not absolute:
        return np.where(a == b, 0.0, np.inf)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        gap = np.abs(b - a)
        distances = gap / (absolute + relative * np.abs(a))
    distances[~np.isfinite(a) | np.isnan(distances)] = np.inf
    distances[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return distances


def _distance_of_order(a: Any, b: Any, top: int, relative: float, absolute: float) -> tuple[float, str]:
    """Compare the places of the best elements of each row. A near tie may be the other way round.

    The place of an element differs by the gap between its value and that of the element which has its place with the
    other version, both as the client's version sees them.
    """
    import numpy as np

    if not a.shape[1]:
        return 0.0, ""
    largest, text = 0.0, ""
    step = max(1, _PIECE // a.shape[1])
    for begin in range(0, len(a), step):
        mine, its = a[begin : begin + step], b[begin : begin + step]
        order, other = (np.argsort(-part.astype(np.float64), axis=1, kind="stable")[:, :top] for part in (mine, its))
        first, second = (np.take_along_axis(mine, places, axis=1) for places in (order, other))
        distances = np.where(order == other, 0.0, _distances(first, second, relative, absolute))
        broken = np.isnan(mine.astype(np.float64)).sum(axis=1) != np.isnan(its.astype(np.float64)).sum(axis=1)
        distances[broken] = np.inf
        row, place = np.unravel_index(int(distances.argmax()), distances.shape)
        if distances[row, place] > largest:
            largest = float(distances[row, place])
            text = (
                f"row {begin + row}, place {place + 1}: class {other[row, place]}, and {order[row, place]} with the "
                "version that the client has"
            )
    return largest, text


def _distance_of_texts(data: bytes | memoryview, its: bytes | memoryview) -> tuple[float, str]:
    from shm.datatypes import decode_strings

    mine, other = decode_strings(data), decode_strings(its)
    for place, (one, two) in enumerate(zip(mine, other, strict=False)):
        if one != two:
            return math.inf, f"element {place} is another text of {len(two)} bytes"  # texts of clients are not shown
    return math.inf, f"{len(other)} elements, and {len(mine)} with the version that the client has"


def _distance_of_classes(data: bytes | memoryview, its: bytes | memoryview, rule: OutputRule) -> tuple[float, str]:
    """Compare best classes, `score:index` or `score:index:label`, place by place. Near ties may be exchanged."""
    from shm.datatypes import decode_strings

    mine, other = decode_strings(data), decode_strings(its)
    if len(mine) != len(other):
        return math.inf, f"{len(other)} classes, and {len(mine)} with the version that the client has"
    relative = TOLERANCES["FP32"][0] if rule.relative is None else rule.relative
    absolute = TOLERANCES["FP32"][1] if rule.absolute is None else rule.absolute
    largest, text = 0.0, ""
    for place, (one, two) in enumerate(zip(mine, other, strict=True)):
        (score, _, index), (its_score, _, its_index) = (each.partition(b":") for each in (one, two))
        if index == its_index and rule.compare != "close":
            continue
        a, b = float(score), float(its_score)
        allowed = absolute + relative * abs(a)
        same = a == b or (math.isnan(a) and math.isnan(b))
        distance = 0.0 if same else abs(a - b) / allowed if allowed else math.inf
        if distance > largest or math.isnan(distance):
            largest = math.inf if math.isnan(distance) else distance
            text = f"place {place + 1} is {two[:60]!r}, and {one[:60]!r} with the version that the client has"
    return largest, text
