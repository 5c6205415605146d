"""Files of cases, and the files with a real Triton's responses to them.

A record is JSON: for every case the list of its steps. Each has the digest of its request, so that a response is never
used for another request.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from bench.oracle.responses import StepResponse

if TYPE_CHECKING:
    from pathlib import Path

    from bench.oracle.steps import Case, Step


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
