"""The limit of repeated lines as it is in a server."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def repeated_errors_are_logged() -> None:
    """In place of the fixture of all other tests."""
