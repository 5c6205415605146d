"""docs/caches.md, followed: a package that is not ours adds a cache, and a server uses it."""

from __future__ import annotations

import json
import os
import tomllib
import urllib.request
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerFailed, ServerProcess, wait_for
from kernel.cache.caching import ENTRY_POINT_GROUP, make_cache
from kernel.cache.config import CacheChoice
from kernel.cache.redis_store import redis_settings
from kernel.errors import InvalidArgument
from kernel.testing import FakeClock
from shm.blocks import ByteBudget
from tests.docs.documents import ROOT, code_blocks, code_spans, document, section, table

if TYPE_CHECKING:
    from pathlib import Path

PAGE = document("docs/caches.md")

MODEL = """
backend: "identity"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
response_cache { enable: true }
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write what pip would write for the package of the page, where servers and this process find it."""
    [module], [project] = (
        code_blocks(section(PAGE, "A cache of your own"), language) for language in ("python", "toml")
    )
    metadata = tomllib.loads(project.text)["project"]
    [(name, target)] = metadata["entry-points"][ENTRY_POINT_GROUP].items()
    folder = tmp_path / "packages"
    info = folder / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{target.partition(':')[0]}.py").write_text(module.text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(folder))))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(MODEL)
    return tmp_path / "models"


def ask(server: ServerProcess) -> list[float]:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    with urllib.request.urlopen(f"http://{server.url}/v2/models/m/infer", json.dumps(body).encode()) as response:
        found: list[float] = json.load(response)["outputs"][0]["data"]
        return found


def hits(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"http://{server.url}/v2/models/m/stats") as response:
        count: int = json.load(response)["model_stats"][0]["inference_stats"]["cache_hit"]["count"]
        return count


def test_a_package_adds_a_cache_by_its_entry_point(package: Path, repository: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for expected in (0, 1):  # the second server finds what the first one has stored
        with ServerProcess(repository, f"--cache-config=folder,path={kept}") as server:
            assert ask(server) == [1, 2]
            assert hits(server) == expected
            wait_for(lambda: bool(list(kept.iterdir())))


def test_settings_that_the_package_refuses_end_the_start(package: Path, repository: Path) -> None:
    with pytest.raises(ServerFailed, match="cache 'folder' does not take its settings: the setting 'path' names"):
        ServerProcess(repository, "--cache-config=folder,other=1").start()
    with pytest.raises(InvalidArgument, match="caches are folder, local, redis"):
        make_cache(CacheChoice("other", {}), FakeClock(), ByteBudget(1000))


def test_the_table_of_redis_has_all_settings() -> None:
    named = {name for row in table(section(PAGE, "Redis")) for name in code_spans(row[0])}
    with pytest.raises(InvalidArgument) as error:
        redis_settings({"none": "1"})
    assert named == set(error.value.message.partition("settings are ")[2].split(", "))
