"""Packages of the documents, installed into a folder as pip would do it."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from tests.docs.documents import code_blocks

if TYPE_CHECKING:
    from pathlib import Path


def install(page: str, folder: Path) -> None:
    """Write into `folder` the package that a page describes: its first Python block is the only module, and its TOML
    block the `pyproject.toml`."""
    [project] = code_blocks(page, "toml")
    metadata = tomllib.loads(project.text)["project"]
    [(group, points)] = metadata["entry-points"].items()
    [(extension, target)] = points.items()
    name, version = metadata["name"], metadata["version"]
    (folder / f"{target.partition(':')[0]}.py").write_text(code_blocks(page, "python")[0].text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{extension} = {target}\n")
