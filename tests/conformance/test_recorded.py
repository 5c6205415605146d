"""Our answers to all conformance cases beside those that a real Triton has given (`make oracle ARGS=--record`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tritonclient.grpc")

from bench.oracle.record import Record, load_cases
from bench.oracle.responses import cleaned, expected, is_expected
from bench.oracle.servers import CASES, MODELS, RECORDED, Ours

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.oracle.steps import Case

pytestmark = pytest.mark.conformance

EVERY_CASE = [(path.stem, case) for path in sorted(CASES.glob("*.py")) for case in load_cases(path)]


#: Cases that say something of all models of the server: they need one that no other case has used.
ALONE = {"readiness"}


def serve() -> Iterator[Ours]:
    with Ours(MODELS) as running:
        yield running
        assert "Traceback" not in running.process.log, running.process.log


@pytest.fixture(scope="module")
def shared() -> Iterator[Ours]:
    yield from serve()


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[Ours]:
    """The server of all cases, or one of its own for a case in ALONE."""
    if request.node.callspec.params["case"].name in ALONE:
        yield from serve()
    else:
        yield request.getfixturevalue("shared")


@pytest.mark.parametrize(("name", "case"), EVERY_CASE, ids=[f"{name}: {case.name}" for name, case in EVERY_CASE])
def test_we_answer_as_triton_did(ours: Ours, name: str, case: Case) -> None:
    record = Record.read(RECORDED / f"{name}.json")
    wrong = []
    for number, step in enumerate(case.steps):
        theirs = record.response(case, number, step)
        wanted = expected(theirs, step.difference)
        answer = cleaned(ours.ask(step), step.ignore, ours.repository)
        if not is_expected(answer, wanted):
            wrong.append(f"step {number + 1}: {step.args}\n  ours   {answer}\n  wanted {wanted}")
        elif step.difference is not None and answer == theirs:
            wrong.append(f"step {number + 1} differs no longer: {step.difference.reason}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_recorded_that_no_case_asks_for() -> None:
    asked = {name: {case.name for found, case in EVERY_CASE if found == name} for name, _ in EVERY_CASE}
    assert {path.stem: Record.read(path).names() for path in RECORDED.glob("*.json")} == asked
