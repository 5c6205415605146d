"""docs/backends.md, followed: a package that is not ours adds a backend, and a model uses it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import numpy as np

from backends.registry import BUILT_IN, known_backends
from kernel.embedding import EmbeddedServer
from tests.docs.documents import ROOT, code_blocks, code_spans, document, table
from tests.docs.packages import install

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = document("docs/backends.md")


def test_a_package_adds_a_backend_by_its_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [config] = code_blocks(PAGE, "pbtxt")
    packages = folder / "packages"
    packages.mkdir()
    install(PAGE, packages)
    monkeypatch.syspath_prepend(packages)  # for the kernel's table of backends
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(packages))))  # for workers
    assert known_backends()["scale"] == "scale_backend:ScaleBackend"

    model = re.search(r"`(models/scaled)/config.pbtxt`", PAGE)
    assert model is not None
    (folder / model[1] / "1").mkdir(parents=True)
    (folder / model[1] / "config.pbtxt").write_text(config.text)
    with EmbeddedServer(folder / "models") as server:
        small, large = np.array([1, 2], np.float32), np.arange(100_000, dtype=np.float32)
        assert server.infer("scaled", {"IN": small})["OUT"].tolist() == [2.5, 5]
        assert np.array_equal(server.infer("scaled", {"IN": large})["OUT"], large * np.float32(2.5))


def test_the_table_names_every_backend_that_is_built_in() -> None:
    assert {name for row in table(PAGE) for name in code_spans(row[0])} == set(BUILT_IN)
