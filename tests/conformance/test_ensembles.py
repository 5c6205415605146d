"""Our responses of ensembles beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/ensembles --record` records Triton's.
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

pytestmark = pytest.mark.conformance

ENSEMBLES = Suite(SUITE / "ensembles")


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with ENSEMBLES.served() as running:
        yield running


def test_ensembles_respond_as_those_of_triton(ours: Ours) -> None:
    """One test, because statistics and the index depend on what was asked before."""
    wrong = [text for name, case in ENSEMBLES.cases for text in ENSEMBLES.wrong_steps(ours, name, case)]
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    ENSEMBLES.check_recorded()
