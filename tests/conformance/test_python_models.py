"""Our responses of Python models beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/python_models --record` records Triton's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tritonclient.grpc")

from bench.oracle.record import Record, load_cases
from bench.oracle.responses import cleaned, expected, is_expected
from bench.oracle.servers import SUITE, Ours

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.oracle.steps import Case

pytestmark = pytest.mark.conformance

PYTHON_MODELS = SUITE / "python_models"
EVERY_CASE = [(path.stem, case) for path in sorted((PYTHON_MODELS / "cases").glob("*.py")) for case in load_cases(path)]


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with Ours(PYTHON_MODELS / "models") as running:
        yield running


@pytest.mark.parametrize(("name", "case"), EVERY_CASE, ids=[f"{name}: {case.name}" for name, case in EVERY_CASE])
def test_python_models_respond_as_those_of_triton(ours: Ours, name: str, case: Case) -> None:
    record = Record.read(PYTHON_MODELS / "recorded" / f"{name}.json")
    wrong = []
    for number, step in enumerate(case.steps):
        theirs = record.response(case, number, step)
        wanted = expected(theirs, step.difference)
        found = cleaned(ours.ask(step), step.ignore, ours.repository)
        if not is_expected(found, wanted):
            wrong.append(f"step {number + 1}: {step.args}\n  ours   {found}\n  wanted {wanted}")
        elif step.difference is not None and found == theirs:
            wrong.append(f"step {number + 1} differs no longer: {step.difference.reason}")
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    asked = {name: {case.name for found, case in EVERY_CASE if found == name} for name, _ in EVERY_CASE}
    folder = PYTHON_MODELS / "recorded"
    assert {path.stem: Record.read(path).names() for path in folder.glob("*.json")} == asked
