"""Compares recorded responses with new ones. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.recording.format import RecordedTensor, ResponseRecord
    from kernel.recording.replayed import ReplayedOutput, ReplayedResponse

_FLOATS = ("FP16", "FP32", "FP64", "BF16")


class Tolerance(msgspec.Struct, frozen=True):
    """How far numbers may be from the recorded ones: `absolute + relative * |recorded|`. With zeros, bytes count."""

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bytes must be equal."""
        return not self.relative and not self.absolute


class Comparison(msgspec.Struct):
    """What a comparison of one request's responses has found."""

    #: A line for each difference.
    differences: list[str] = []
    #: How many outputs were compared, and how many could not be, because their values are not in the recording.
    compared: int = 0
    not_compared: int = 0
    #: Whether one of the differences is an error, on either side.
    errors_differ: bool = False
    #: How far a number is from the recorded one at most, where that is more than the tolerance.
    largest_distance: float = 0.0


def compare(recorded: Sequence[ResponseRecord], found: Sequence[ReplayedResponse], tolerance: Tolerance) -> Comparison:
    """Compare all responses of a request; those that only mark the end do not count."""
    comparison = Comparison()
    expected = [each for each in recorded if each.outputs is not None or each.error]
    for number, (old, new) in enumerate(zip(expected, found, strict=False), 1):
        where = f"response {number}: " if len(expected) > 1 else ""
        if old.error or new.error:
            if old.error != new.error:
                comparison.errors_differ = True
                comparison.differences.append(f"{where}{_error_text(old.error, new.error)}")
            continue
        for text in _compare_outputs(old.outputs or (), new.outputs, tolerance, comparison):
            comparison.differences.append(where + text)
    if len(expected) != len(found):
        comparison.differences.append(f"{len(expected)} responses were recorded, now there are {len(found)}")
        errors = [*(each.error for each in expected[len(found) :]), *(each.error for each in found[len(expected) :])]
        comparison.errors_differ = comparison.errors_differ or any(errors)
    return comparison


def _error_text(old: str, new: str) -> str:
    if not old:
        return f"an error that was not recorded: {new}"
    if not new:
        return f"no error, and recorded was: {old}"
    return f"another error: {new}; recorded was: {old}"


def _compare_outputs(
    old: Sequence[RecordedTensor], new: Sequence[ReplayedOutput], tolerance: Tolerance, comparison: Comparison
) -> Iterator[str]:
    found = {output.name: output for output in new}
    for tensor in old:
        output = found.pop(tensor.name, None)
        if output is None:
            yield f"output '{tensor.name}' is missing"
            continue
        kinds = [f"{each.datatype} {each.shape}" for each in (tensor, output)]
        if kinds[0] != kinds[1]:
            yield f"output '{tensor.name}' is {kinds[1]}, and recorded was {kinds[0]}"
        elif tensor.data is None and tensor.sha256 is None and (tensor.region or tensor.missing):
            comparison.not_compared += 1
        else:
            comparison.compared += 1
            if (text := _compare_values(tensor, output, tolerance, comparison)) is not None:
                yield f"output '{tensor.name}' {text}"
    for name in found:
        yield f"output '{name}' was not recorded"


def _compare_values(
    tensor: RecordedTensor, output: ReplayedOutput, tolerance: Tolerance, comparison: Comparison
) -> str | None:
    """Return how values differ; None if they do not."""
    if tensor.sha256 is not None:
        same = hashlib.sha256(output.data).digest() == tensor.sha256
        return None if same else "differs; only its digest was recorded"
    old, new = tensor.data or b"", output.data
    if old == new:
        return None
    if len(old) != len(new) and tensor.datatype != "BYTES":
        return f"has {len(new)} bytes, and recorded were {len(old)}"
    try:
        was, now = (_array(tensor.datatype, tensor.shape, data) for data in (old, new))
    except (ValueError, KeyError):
        return "has other bytes"
    if tensor.datatype == "BYTES":
        return _compare_texts(was, now)
    return _compare_numbers(was, now, tensor.datatype in _FLOATS, tolerance, comparison)


def _compare_texts(old: Any, new: Any) -> str:
    differing = [index for index, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    first = differing[0]
    return (
        f"differs in {len(differing)} of {len(old)} elements; element {first} is {_short(new[first])}, and recorded "
        f"was {_short(old[first])}"
    )


def _compare_numbers(old: Any, new: Any, floats: bool, tolerance: Tolerance, comparison: Comparison) -> str | None:
    import numpy as np  # only where outputs differ

    unequal = ~((old == new) | (np.isnan(old) & np.isnan(new))) if floats else old != new
    if not unequal.any():
        return "has equal values in other bytes (signs of zeros, or NaNs)" if tolerance.exact else None
    with np.errstate(all="ignore"):
        distance = np.abs(new.astype(np.float64) - old.astype(np.float64))
        allowed = tolerance.absolute + tolerance.relative * np.abs(old.astype(np.float64))
        beyond = unequal & ~(distance <= allowed)  # a distance that is NaN or infinite is beyond
    if not tolerance.exact and not beyond.any():
        return None
    worst = int(np.argmax(np.where(beyond, np.nan_to_num(distance, nan=np.inf, posinf=np.inf), -1.0)))
    comparison.largest_distance = max(comparison.largest_distance, float(np.nan_to_num(distance[worst], nan=np.inf)))
    return (
        f"differs in {int(beyond.sum())} of {old.size} elements, by at most {distance[worst]:.6g}; element {worst} is "
        f"{new[worst]}, and recorded was {old[worst]}"
    )


def _array(datatype: str, shape: Sequence[int], data: bytes) -> Any:
    """Return a flat array of the elements. Raises ValueError, and KeyError for an unknown datatype."""
    import numpy as np  # as above

    from shm.arrays import to_array

    if datatype == "BF16":  # the upper half of an FP32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return to_array(datatype, shape, data).reshape(-1)


def _short(element: bytes) -> str:
    text = repr(bytes(element[:61]))
    return text if len(element) <= 60 else f"{text}…"
