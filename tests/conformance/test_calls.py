"""Our responses to calls between models beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/calls --record` records Triton's.
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

CALLS = Suite(SUITE / "calls")


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with CALLS.served() as running:
        yield running


def test_calls_respond_as_those_of_triton(ours: Ours) -> None:
    """One test, because models are loaded and unloaded by what was asked before."""
    wrong = [text for name, case in CALLS.cases for text in CALLS.wrong_steps(ours, name, case)]
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    CALLS.check_recorded()
