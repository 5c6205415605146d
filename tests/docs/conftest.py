"""Examples of documents are run in a folder of their own, by servers in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.docs.documents import PYTHONPATH
from tests.end_to_end.conftest import regions

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder", "regions"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the current one; workers import the packages of this tree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return tmp_path
