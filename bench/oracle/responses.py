"""What came back for a step, and how two servers' answers are compared. Pure.

Times, versions of servers and rounding are left out of the comparison; everything else must be equal, texts of
errors letter by letter.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bench.oracle.steps import Difference

#: Members that hold times: only whether they are zero is compared.
TIMES = frozenset({"ns", "last_inference"})
#: Binary answers longer than this are compared by their digest.
LONGEST_HEX = 512

Verdict = Literal["same", "wording", "body", "status", "broken"]


@dataclass(frozen=True)
class StepResponse:
    """One answer: a status such as `http 200` or `grpc NOT_FOUND`, what it says, and the text of an error."""

    status: str
    body: Any = None
    error: str | None = None


def plain(value: Any, ignore: tuple[str, ...], repository: str = "") -> Any:
    """Leave out what may differ from run to run and from machine to machine, and round floats."""
    if isinstance(value, dict):
        return {
            key: _time(value[key]) if key in TIMES else plain(value[key], ignore, repository)
            for key in sorted(value)
            if key not in ignore
        }
    if isinstance(value, list):
        kept = [each for each in value if not (isinstance(each, dict) and each.get("name") in ignore)]
        return [plain(each, ignore, repository) for each in kept]
    if isinstance(value, str):
        return value.replace(repository, "MODELS") if repository else value
    if isinstance(value, float):
        # NaN is not equal to itself, and JSON has no literal for it.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def renamed(value: Any, name: str, other: str) -> Any:
    """Return `value` with `other` in place of `name` in every text, at any depth; keys stay."""
    if isinstance(value, dict):
        return {key: renamed(each, name, other) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, name, other) for each in value]
    return value.replace(name, other) if isinstance(value, str) else value


def _time(value: Any) -> str:
    return "some" if float(value) > 0 else "none"


def cleaned(answer: StepResponse, ignore: tuple[str, ...], repository: str) -> StepResponse:
    """Return `answer` as it is kept: without times and without the place of the models on this machine."""
    return StepResponse(answer.status, plain(answer.body, ignore, repository), plain(answer.error, (), repository))


def expected(theirs: StepResponse, difference: Difference | None) -> StepResponse:
    """Return what our answer has to be, given Triton's."""
    return theirs if difference is None else replace(theirs, **difference.ours)


def is_expected(answer: StepResponse, wanted: StepResponse) -> bool:
    """Say whether `answer` is what was wanted; a body of `...` is any body."""
    if wanted.body is ...:
        wanted = replace(wanted, body=answer.body)
    return answer == wanted


def verdict(ours: StepResponse, theirs: StepResponse) -> Verdict:
    """Say what differs between two cleaned answers."""
    if ours.status == "broken" and theirs.status != "broken":
        return "broken"
    if ours.status != theirs.status:
        return "status"
    if ours.body != theirs.body or (ours.error is None) != (theirs.error is None):
        return "body"
    return "same" if ours.error == theirs.error else "wording"


def binary_text(content: bytes) -> str:
    """Return binary content in a form that fits into a record."""
    if len(content) <= LONGEST_HEX:
        return content.hex()
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"
