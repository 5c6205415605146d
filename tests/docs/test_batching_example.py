"""docs/batching.md, followed: a package that is not ours adds a batching rule, and a model uses it."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.app import StartFailed
from kernel.embedding import EmbeddedServer
from kernel.extensions import extension
from schedulers.start_hold import VARIABLE
from tests.docs.documents import ROOT, code_blocks, document
from tests.docs.packages import install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = document("docs/batching.md")
CONFIG = code_blocks(PAGE, "pbtxt")[-1].text


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packages = tmp_path / "packages"
    packages.mkdir()
    install(PAGE, packages)
    extension.cache_clear()
    monkeypatch.syspath_prepend(packages)
    yield
    sys.modules.pop("volume_rule", None)


def write_model(folder: Path, config: str) -> Path:
    """Write a model that also returns how many requests were executed together."""
    model = folder / "models" / "batched"
    model.mkdir(parents=True)
    shutil.copytree(ROOT / "tests" / "models" / "batched" / "1", model / "1")
    (model / "config.pbtxt").write_text(config)
    return folder / "models"


def test_a_rule_of_a_package_decides_which_requests_share_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    with EmbeddedServer(write_model(folder, CONFIG)) as server, ThreadPoolExecutor(5) as threads:
        sent = [threads.submit(server.infer, "batched", {"IN": np.array([[n]], np.float32)}) for n in range(5)]
        responses = [each.result() for each in sent]
    assert [response["OUT"].tolist() for response in responses] == [[[2.0 * n]] for n in range(5)]
    # Each request has 4 bytes, and the limit is 8.
    assert sorted(int(response["REQUESTS"][0, 0]) for response in responses) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("place", ["1/batchstrategy.so", "batchstrategy.so", "TRITON_BATCH_STRATEGY_PATH"])
def test_a_library_beside_the_model_is_refused_with_a_text_that_says_how_to_do_it(folder: Path, place: str) -> None:
    config = CONFIG.replace("naiad.batching", "ignored" if place.endswith(".so") else place)
    models = write_model(folder, config)
    if place.endswith(".so"):
        (models / "batched" / place).touch()
    with pytest.raises(StartFailed, match="failed to load all models"), EmbeddedServer(models):
        pass


def test_a_library_beside_a_model_that_names_a_rule_is_left_alone(folder: Path) -> None:
    models = write_model(folder, CONFIG)
    (models / "batched" / "1" / "batchstrategy.so").touch()
    with EmbeddedServer(models) as server:
        assert server.infer("batched", {"IN": np.array([[1]], np.float32)})["OUT"].tolist() == [[2]]
    assert os.path.exists(models)
