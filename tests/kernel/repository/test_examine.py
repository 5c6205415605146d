"""A model is examined as a load would, without being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.gpus import NO_GPUS
from kernel.errors import InternalError, ServingError
from kernel.repository.source import ModelSource, scan
from tests.kernel.repository_lab import run

if TYPE_CHECKING:
    from tests.kernel.repository_lab import RepositoryLab


def source(lab: RepositoryLab, name: str) -> ModelSource:
    return ModelSource(scan((lab.root,)).models[name], gpus=NO_GPUS, auto_complete=True)


def test_a_worker_completes_and_verifies_and_is_ended(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("right")
        examined = source(lab, "right")
        prepared = await lab.lifecycle.loader.examine(examined, examined.read(), 1)
        assert prepared.spec.inputs.keys() == {"IN"}
        assert [(keeper.plan, keeper.stopped) for keeper in lab.keepers] == [(None, True)]
        assert lab.catalog.index() == []

    run(lab, scenario)


def test_what_does_not_fit_is_an_error_and_the_worker_is_ended(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("wrong")
        lab.fail("wrong", 1, "the file is cut off")
        examined = source(lab, "wrong")
        with pytest.raises(InternalError, match="the file is cut off"):
            await lab.lifecycle.loader.examine(examined, examined.read(), 1)
        assert [keeper.stopped for keeper in lab.keepers] == [True]

    run(lab, scenario)


def test_a_start_with_names_looks_into_the_folders_of_these_models_only(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("wanted")
        lab.write("other")
        # A listing of everything would fail.
        loop = lab.root / "other" / "deep"
        for _ in range(101):
            loop = loop / "d"
        loop.mkdir(parents=True)
        assert await lab.lifecycle.start(["wanted", "nothing"]) == ["nothing"]
        assert [item.name for item in lab.catalog.index(ready=True)] == ["wanted"]
        assert {item.name for item in await lab.lifecycle.index()} == {"wanted", "other"}
        with pytest.raises(ServingError, match="inside one another"):
            await lab.lifecycle.start(["*"])

    run(lab, scenario)
