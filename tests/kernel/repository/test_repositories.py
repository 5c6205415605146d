"""Several repositories, namespaces, and what comes and goes in the folders while the server runs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError, InvalidArgument, ModelLoadFailed, Unavailable
from kernel.repository.settings import LifecycleSettings
from kernel.repository.testing import CONFIG, RepositoryLab, run, settled
from kernel.serving.catalog import IndexItem
from schedulers.direct import direct

if TYPE_CHECKING:
    from pathlib import Path


def two_repositories(root: Path, **settings: Any) -> tuple[RepositoryLab, RepositoryLab]:
    """Return a bench over two repositories that both have model `m`, and one that only writes to the second."""
    first, second = root / "first", root / "second"
    for folder in (first, second):
        folder.mkdir()
    bench = RepositoryLab(first, direct, LifecycleSettings((first, second), **settings))
    bench.write("m")
    other = RepositoryLab(second, direct)
    other.write("m")
    other.write("n")
    return bench, other


def test_a_name_in_two_repositories_is_loaded_from_neither(tmp_path: Path) -> None:
    bench, _ = two_repositories(tmp_path)

    async def scenario(bench: RepositoryLab) -> None:
        assert await bench.lifecycle.start() == ["m"]
        assert await bench.lifecycle.index(ready=True) == [
            IndexItem("m", "", "UNAVAILABLE", "model appears in two or more repositories"),
            IndexItem("n", "1", "READY"),
        ]

    run(bench, scenario)


def test_what_is_there_twice_concerns_only_those_who_ask_for_it(tmp_path: Path) -> None:
    bench, _ = two_repositories(tmp_path, explicit=True)

    async def scenario(bench: RepositoryLab) -> None:
        assert await bench.lifecycle.start(["n"]) == []
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m")

    run(bench, scenario)


def test_with_namespacing_both_are_loaded_and_one_must_go_before_the_name_answers(tmp_path: Path) -> None:
    bench, other = two_repositories(tmp_path, explicit=True, namespacing=True)

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        assert [(item.name, item.state) for item in await bench.lifecycle.index()] == [
            ("m", "READY"), ("m", "READY"), ("n", ""),
        ]  # fmt: skip
        with pytest.raises(InvalidArgument, match="^There are 2 identifiers of model 'm' in global map"):
            bench.catalog.resolve("m")
        other.fail("m", 1, "no luck")
        (tmp_path / "first" / "m" / "1" / "new").touch()
        with pytest.raises(ModelLoadFailed) as caught:
            await bench.lifecycle.load("m")
        assert caught.value.message == (
            f"load failed for model '{tmp_path}/second::m': version 1 is at UNAVAILABLE state: Internal: no luck;\n"
        )
        await bench.lifecycle.unload("m")
        await settled()
        assert bench.alive == []
        await bench.lifecycle.load("n")
        assert bench.catalog.resolve("n").spec.namespace == str(tmp_path / "second")

    run(bench, scenario)


def test_the_index_shows_what_came_and_went_since_the_last_load(bench: RepositoryLab) -> None:
    async def scenario(bench: RepositoryLab) -> None:
        bench.write("new")
        assert await bench.lifecycle.index() == [IndexItem("new")]
        shutil.rmtree(bench.root / "new")
        assert await bench.lifecycle.index() == []

    run(bench, scenario)


# ---- poll mode ------------------------------------------------------------------------------


def test_polling_loads_what_is_new_or_changed_and_unloads_what_is_gone(tmp_path: Path) -> None:
    bench = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    bench.write("kept")
    bench.write("gone")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.start()
        kept, keepers = bench.catalog.resolve("kept"), len(bench.keepers)
        await bench.lifecycle.poll()
        assert len(bench.keepers) == keepers, "nothing had changed"
        shutil.rmtree(tmp_path / "gone")
        bench.write("new")
        bench.write("kept", (1, 2))
        await bench.lifecycle.poll()
        await settled()
        assert bench.catalog.resolve("kept").version == 2
        assert bench.catalog.resolve("kept") is not kept
        assert [(item.name, item.state) for item in bench.catalog.index()] == [
            ("gone", "UNAVAILABLE"), ("kept", "UNAVAILABLE"), ("kept", "READY"), ("new", "READY"),
        ]  # fmt: skip
        with pytest.raises(Unavailable):
            await bench.lifecycle.load("new")

    run(bench, scenario)


def test_polling_takes_no_serving_version_away_for_a_broken_configuration(tmp_path: Path) -> None:
    bench = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.start()
        serving = bench.catalog.resolve("m")
        bench.write("m", config="max_batch_size: many")
        await bench.lifecycle.poll()
        assert bench.catalog.resolve("m") is serving
        bench.write("m", config=CONFIG + "max_batch_size: 2")
        await bench.lifecycle.poll()
        assert bench.catalog.resolve("m").spec.max_batch_size == 2

    run(bench, scenario)
