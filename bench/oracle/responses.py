"""The response to a step, the comparison of two servers' responses, and records of a real Triton's responses.

Times, server versions and rounding are not compared. Everything else must be equal, error texts letter by letter.

A record is JSON: for every case the list of its steps. Each has the digest of its request, so that a response is never
used for another request.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from protocols.http.route_hints import HINT

if TYPE_CHECKING:
    from pathlib import Path

    from bench.oracle.steps import Case, Difference, Step

#: Members that hold times: only whether they are zero is compared.
TIMES = frozenset({"ns", "last_inference"})

#: Binary content longer than this is compared by its digest.
LONGEST_HEX = 512

Verdict = Literal["same", "wording", "body", "status", "broken"]


@dataclass(frozen=True)
class StepResponse:
    """A status such as `http 200` or `grpc NOT_FOUND`, the content, and the text of an error."""

    status: str
    body: Any = None
    error: str | None = None


def plain(value: Any, ignore: tuple[str, ...], repository: str = "") -> Any:
    """Return `value` without what may differ between runs and machines, and with rounded floats."""
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
        if not repository:
            return value
        # Triton shows clients the paths of models on its machine, we show them in the repository.
        return value.replace(f"{repository}/", "").replace(repository, "MODELS")
    if isinstance(value, float):
        # NaN is not equal to itself, and JSON has no literal for it.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def renamed(value: Any, name: str, other: str) -> Any:
    """Return `value` with `name` replaced by `other` in every text, at any depth. Keys stay."""
    if isinstance(value, dict):
        return {key: renamed(each, name, other) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, name, other) for each in value]
    return value.replace(name, other) if isinstance(value, str) else value


def _time(value: Any) -> str:
    return "some" if float(value) > 0 else "none"


def cleaned(response: StepResponse, ignore: tuple[str, ...], repository: str) -> StepResponse:
    """Return `response` as it is recorded: without times, hints and the path of the models on this machine.

    A hint is what our error for an unknown path has behind Triton's text.
    """
    error = None if response.error is None else response.error.partition(HINT)[0]
    return StepResponse(response.status, plain(response.body, ignore, repository), plain(error, (), repository))


def expected(theirs: StepResponse, difference: Difference | None) -> StepResponse:
    """Return what our response must be, given Triton's."""
    return theirs if difference is None else replace(theirs, **difference.ours)


def is_expected(response: StepResponse, wanted: StepResponse) -> bool:
    """Return whether `response` is equal to `wanted`. A wanted body of `...` stands for any body."""
    if wanted.body is ...:
        wanted = replace(wanted, body=response.body)
    return response == wanted


def verdict(ours: StepResponse, theirs: StepResponse) -> Verdict:
    """Return the first difference between two cleaned responses."""
    if ours.status == "broken" and theirs.status != "broken":
        return "broken"
    if ours.status != theirs.status:
        return "status"
    if ours.body != theirs.body or (ours.error is None) != (theirs.error is None):
        return "body"
    return "same" if ours.error == theirs.error else "wording"


def binary_text(content: bytes) -> str:
    """Return binary content as text for a record: hexadecimal, or size and digest."""
    if len(content) <= LONGEST_HEX:
        return content.hex()
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"


class Stale(Exception):
    """There is no recorded response to exactly this request. Record again with `make oracle ARGS=--record`."""


def load_cases(path: Path) -> list[Case]:
    """Return the cases of a file."""
    spec = importlib.util.spec_from_file_location(f"cases_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases: list[Case] = module.CASES
    return cases


class Record:
    """The recorded responses to one file of cases."""

    def __init__(self, responses: dict[str, list[dict[str, object]]]) -> None:
        self._responses = responses

    @classmethod
    def read(cls, path: Path) -> Record:
        return cls(json.loads(path.read_text()) if path.exists() else {})

    def names(self) -> set[str]:
        """Return the names of the cases that have responses."""
        return set(self._responses)

    def put(self, case: Case, responses: list[StepResponse]) -> None:
        """Add the cleaned responses to all steps of a case."""
        self._responses[case.name] = [
            {"request": step.digest(), **asdict(response)} for step, response in zip(case.steps, responses, strict=True)
        ]

    def response(self, case: Case, number: int, step: Step) -> StepResponse:
        """Return the response to a step, counted from 0. Raises `Stale`."""
        recorded = self._responses.get(case.name, [])
        if number >= len(recorded) or recorded[number]["request"] != step.digest():
            raise Stale(f"{case.name} [{number + 1}]")
        found = recorded[number]
        error = found["error"]
        assert error is None or isinstance(error, str)
        return StepResponse(str(found["status"]), found["body"], error)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self._responses, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
