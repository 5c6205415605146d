"""Whole workers for tests."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests.backends.worker.threaded_worker import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(gc, "freeze", lambda: None)  # it would be for the process of the tests
    made = Bench()
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: made.make_backend)
    yield made
    made.leave()
