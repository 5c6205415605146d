"""Our answers to all conformance cases beside those that a real Triton has given (`make oracle ARGS=--record`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tritonclient.grpc")

from bench.oracle.servers import SUITE
from tests.conformance.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.oracle.servers import Ours
    from bench.oracle.steps import Case

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

RECORDED = Suite(SUITE)

#: Cases that say something of all models of the server: they need one that no other case has used.
ALONE = {"readiness"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Ours]:
    with RECORDED.served() as running:
        yield running


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[Ours]:
    """The server of all cases, or one of its own for a case in ALONE."""
    if request.node.callspec.params["case"].name in ALONE:
        with RECORDED.served() as running:
            yield running
    else:
        yield request.getfixturevalue("shared")


@pytest.mark.parametrize(("name", "case"), RECORDED.cases, ids=RECORDED.ids)
def test_we_answer_as_triton_did(ours: Ours, name: str, case: Case) -> None:
    wrong = RECORDED.wrong_steps(ours, name, case)
    assert not wrong, "\n".join(wrong)


def test_nothing_is_recorded_that_no_case_asks_for() -> None:
    RECORDED.check_recorded()
