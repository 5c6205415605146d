"""Zygotes in the process of the tests, which is not to be frozen."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that the zygote finds."""
    names = ["zygote"]
    for module in ("preloader", "zygote"):
        monkeypatch.setattr(f"backends.zygote.{module}.thread_names", lambda: names)
    return names
