"""docs/backends.md, followed: a package that is not ours adds a backend, and a model uses it."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING

import numpy as np

from backends.registry import BUILT_IN, ENTRY_POINT_GROUP, known_backends
from kernel.embedding import EmbeddedServer
from tests.docs.documents import ROOT, code_blocks, code_spans, document, table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = document("docs/backends.md")


def install(project: dict[str, dict[str, object]], module: str, folder: Path) -> None:
    """Write into `folder` what pip would write for a package of one module."""
    metadata = project["project"]
    points = metadata["entry-points"]
    assert isinstance(points, dict)
    name, version = metadata["name"], metadata["version"]
    [(backend, target)] = points[ENTRY_POINT_GROUP].items()
    (folder / f"{target.partition(':')[0]}.py").write_text(module)
    info = folder / f"{str(name).replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{backend} = {target}\n")


def test_a_package_adds_a_backend_by_its_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [module], [project], [config] = (code_blocks(PAGE, language) for language in ("python", "toml", "pbtxt"))
    packages = folder / "packages"
    packages.mkdir()
    install(tomllib.loads(project.text), module.text, packages)
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
