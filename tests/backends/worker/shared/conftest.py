"""Processes of several models in the process of the tests."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60


@pytest.fixture(autouse=True)
def members_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the threads of members, which collect garbage after they have said that they end.

    What is frozen stays so: it is that of the process of the tests, and a collection that walks through all of it holds
    the interpreter's lock for seconds, so that no test goes on and no time limit is looked at.
    """
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the thread '{thread.name}' goes on after its test"
