"""Our responses to requests of sequences beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/sequences --record` records Triton's.
"""

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

pytestmark = pytest.mark.conformance

SEQUENCES = Suite(SUITE / "sequences")


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with SEQUENCES.served() as running:
        yield running


@pytest.mark.parametrize(("name", "case"), SEQUENCES.cases, ids=SEQUENCES.ids)
def test_sequences_respond_as_those_of_triton(ours: Ours, name: str, case: Case) -> None:
    wrong = SEQUENCES.wrong_steps(ours, name, case)
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    SEQUENCES.check_recorded()
