"""Our responses to calls between models beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/calls --record` records Triton's.
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

CALLS = SUITE / "calls"
EVERY_CASE = [(path.stem, case) for path in sorted((CALLS / "cases").glob("*.py")) for case in load_cases(path)]


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with Ours(CALLS / "models") as running:
        yield running
        assert "Traceback" not in running.process.log, running.process.log


def wrong_steps(ours: Ours, name: str, case: Case) -> list[str]:
    record = Record.read(CALLS / "recorded" / f"{name}.json")
    wrong = []
    for number, step in enumerate(case.steps):
        wanted = expected(record.response(case, number, step), step.difference)
        found = cleaned(ours.ask(step), step.ignore, ours.repository)
        if not is_expected(found, wanted):
            wrong.append(f"{case.name}, step {number + 1}: {step.args}\n  ours   {found}\n  wanted {wanted}")
    return wrong


def test_calls_respond_as_those_of_triton(ours: Ours) -> None:
    """One test, because models are loaded and unloaded by what was asked before."""
    wrong = [text for name, case in EVERY_CASE for text in wrong_steps(ours, name, case)]
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    asked = {name: {case.name for found, case in EVERY_CASE if found == name} for name, _ in EVERY_CASE}
    folder = CALLS / "recorded"
    assert {path.stem: Record.read(path).names() for path in folder.glob("*.json")} == asked
