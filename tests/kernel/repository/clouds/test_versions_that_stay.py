"""Versions of a model in a cloud that serve on while other parts of the model change."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from kernel.repository.clouds.address import parse_address
from kernel.repository.clouds.copies import Copies
from kernel.repository.clouds.repository import CloudRepository
from kernel.repository.settings import LifecycleSettings
from kernel.repository.testing import CONFIG, RepositoryLab, run, settled, until
from schedulers.direct import direct
from tests.kernel.repository.clouds.test_repository import PLACE, MemoryReader

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def new_lab(tmp_path: Path, reader: MemoryReader, copies: Copies) -> RepositoryLab:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings(()))
    repository = CloudRepository(parse_address("s3://bucket/repo"), PLACE, reader, copies)
    lab.lifecycle._repositories.add(repository)
    return lab


def group(count: int) -> str:
    return CONFIG + f"version_policy: {{ all {{}} }} instance_group [{{ count: {count} }}]"


def test_other_instances_and_versions_neither_end_its_workers_nor_keep_later_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that stays needs one copy; each later one would keep the disk space of files that are gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader, copies = MemoryReader(), Copies()
    reader.objects = {"m/config.pbtxt": group(1), "m/1/x": "x"}

    def folders() -> set[Path]:
        return set(tmp_path.glob("naiad-model-*/m-*/*"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        serving, [keeper] = lab.catalog.resolve("m", "1"), lab.keepers
        [first] = folders()
        for number in range(2, 7):
            reader.objects["m/config.pbtxt"] = group(number)
            reader.objects[f"m/{number}/x"] = str(number)
            reader.objects.pop(f"m/{number - 1}/x" if number > 2 else "", None)
            await lab.lifecycle.polling.once()
            await settled()
            assert lab.catalog.resolve("m", "1") is serving
            assert serving.instances.count == number
            assert not keeper.stopped
        plans = [each.plan for each in lab.keepers if each.plan is not None]
        assert {plan.model_dir for plan in plans if plan.version == 1} == {str(first / "m")}
        await until(lambda: len(folders()) == 2)
        assert first in folders()

    run(new_lab(tmp_path, reader, copies), scenario)
