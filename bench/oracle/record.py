"""Files of cases, and the files in which a real Triton's answers to them are kept.

A record is JSON: for every case the list of its steps, each with the digest of the request that was answered, so
that an answer is never taken for one to another request.
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
    """There is no recorded answer to this very request: record again with `make oracle ARGS=--record`."""


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
    """The recorded answers to one file of cases."""

    def __init__(self, answers: dict[str, list[dict[str, object]]]) -> None:
        self._answers = answers

    @classmethod
    def read(cls, path: Path) -> Record:
        return cls(json.loads(path.read_text()) if path.exists() else {})

    def names(self) -> set[str]:
        """Return the names of the cases that have answers."""
        return set(self._answers)

    def put(self, case: Case, answers: list[StepResponse]) -> None:
        """Keep the cleaned answers to all steps of a case."""
        self._answers[case.name] = [
            {"request": step.digest(), **asdict(answer)} for step, answer in zip(case.steps, answers, strict=True)
        ]

    def answer(self, case: Case, number: int, step: Step) -> StepResponse:
        """Return the answer to a step, counted from 0. Raises `Stale`."""
        kept = self._answers.get(case.name, [])
        if number >= len(kept) or kept[number]["request"] != step.digest():
            raise Stale(f"{case.name} [{number + 1}]")
        found = kept[number]
        error = found["error"]
        assert error is None or isinstance(error, str)
        return StepResponse(str(found["status"]), found["body"], error)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self._answers, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
