"""Our responses of Python models beside those that a real Triton has given.

`python -m bench.oracle --suite tests/conformance/python_models --record` records Triton's.
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

PYTHON_MODELS = Suite(SUITE / "python_models")


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with PYTHON_MODELS.served(may_fail=True) as running:
        yield running


@pytest.mark.parametrize(("name", "case"), PYTHON_MODELS.cases, ids=PYTHON_MODELS.ids)
def test_python_models_respond_as_those_of_triton(ours: Ours, name: str, case: Case) -> None:
    wrong = PYTHON_MODELS.wrong_steps(ours, name, case)
    assert not wrong, "\n".join(wrong)


def test_each_recorded_case_is_asked_for() -> None:
    PYTHON_MODELS.check_recorded()
