"""Our responses to requests of sequences beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/sequences --record` records Triton's.
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

SEQUENCES = SUITE / "sequences"
EVERY_CASE = load_cases(SEQUENCES / "cases" / "sequences.py")


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with Ours(SEQUENCES / "models") as running:
        yield running
        assert "Traceback" not in running.process.log, running.process.log


@pytest.mark.parametrize("case", EVERY_CASE, ids=[case.name for case in EVERY_CASE])
def test_sequences_respond_as_those_of_triton(ours: Ours, case: Case) -> None:
    record = Record.read(SEQUENCES / "recorded" / "sequences.json")
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
