"""docs/agents.md, followed: a package that is not ours adds a repository agent, and a model is loaded through it."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.app import StartFailed
from kernel.config.load import from_pbtxt
from kernel.embedding import EmbeddedServer
from kernel.extensions import extension
from kernel.repository.agents import RepositoryAgent
from tests.docs.documents import code_blocks, code_spans, document, section, table
from tests.docs.packages import install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = document("docs/agents.md")
CHECKSUM, UNPACK = (block.text for block in code_blocks(PAGE, "pbtxt"))

MODEL = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packages = folder / "packages"
    packages.mkdir()
    install(section(PAGE, "An agent of your own"), packages)
    extension.cache_clear()
    monkeypatch.syspath_prepend(packages)
    yield
    sys.modules.pop("unpack_agent", None)


def archive(path: Path) -> None:
    """Write an archive with a model that has one empty version."""
    with tarfile.open(path, "w") as files:
        version = tarfile.TarInfo("1")
        version.type, version.mode = tarfile.DIRTYPE, 0o755
        files.addfile(version)
        config = tarfile.TarInfo("config.pbtxt")
        config.size = len(MODEL)
        files.addfile(config, io.BytesIO(MODEL.encode()))


def test_a_package_adds_an_agent_by_its_entry_point(folder: Path, package: None) -> None:
    model = folder / "models" / "packed"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text(UNPACK)
    archive(model / "model.tar")
    with EmbeddedServer(folder / "models") as server:
        assert server.infer("packed", {"IN": np.array([1, 2], np.float32)})["OUT"].tolist() == [1, 2]


def test_the_checksum_of_the_page_is_checked(folder: Path) -> None:
    [agent] = from_pbtxt(CHECKSUM.encode(), "docs/agents.md").model_repository_agents.agents
    [value] = agent.parameters.values()
    model = folder / "models" / "checked"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").write_bytes(b"other weights")
    (model / "config.pbtxt").write_text(MODEL + CHECKSUM)
    with pytest.raises(StartFailed, match=f"Mismatched MD5 hash for file 1/model.onnx, expect: {value}"):
        EmbeddedServer(folder / "models").start()
    digest = hashlib.md5(b"other weights").hexdigest()
    (model / "config.pbtxt").write_text(MODEL + CHECKSUM.replace(value, digest))
    with EmbeddedServer(folder / "models") as server:
        assert server.infer("checked", {"IN": np.array([3], np.float32)})["OUT"].tolist() == [3]


def test_the_table_has_the_five_actions() -> None:
    named = [code_spans(row[0])[0] for row in table(PAGE)]
    assert named == ["load", "load_complete", "load_fail", "unload", "unload_complete"]
    assert all(callable(getattr(RepositoryAgent, name)) for name in named)
