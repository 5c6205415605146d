"""For all tests: no test depends on how fast the machine is, and none holds its event loop up."""

from __future__ import annotations

from hypothesis import settings

from tests.slow_callbacks import pytest_runtest_call, pytest_runtest_teardown, watch

__all__ = ["pytest_runtest_call", "pytest_runtest_teardown"]

settings.register_profile("naiad", deadline=None)
settings.load_profile("naiad")
watch()
