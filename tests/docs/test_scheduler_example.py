"""docs/schedulers.md, followed: a package that is not ours adds a scheduler, its test passes, and a model uses it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.app import StartFailed
from kernel.embedding import EmbeddedServer
from kernel.extensions import extension
from tests.docs.documents import code_blocks, document
from tests.docs.packages import install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = document("docs/schedulers.md")
CONFIG = code_blocks(PAGE, "pbtxt")[0].text


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    packages = tmp_path / "packages"
    packages.mkdir()
    install(PAGE, packages)
    extension.cache_clear()
    monkeypatch.syspath_prepend(packages)
    yield packages
    sys.modules.pop("newest_scheduler", None)


def write_model(folder: Path, config: str = CONFIG) -> Path:
    (folder / "models" / "newest" / "1").mkdir(parents=True)
    (folder / "models" / "newest" / "config.pbtxt").write_text(config)
    return folder / "models"


def test_a_model_chooses_the_scheduler_of_a_package_by_its_name(folder: Path) -> None:
    with EmbeddedServer(write_model(folder)) as server:
        assert server.infer("newest", {"IN": np.array([2], np.float32)})["OUT"].tolist() == [2]


def test_the_tests_of_the_page_pass() -> None:
    names: dict[str, object] = {}
    exec(compile(code_blocks(PAGE, "python")[1].text, "docs/schedulers.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        assert callable(test)
        test()


def test_a_name_that_no_package_has_fails_the_load_and_lists_those_that_are_installed(folder: Path) -> None:
    models = write_model(folder, CONFIG.replace('"newest_first"', '"oldest_last"'))
    with pytest.raises(StartFailed) as caught, EmbeddedServer(models):
        pass
    assert "there is no scheduler 'oldest_last'; installed are 'newest_first' of package newest-scheduler 1.0" in str(
        caught.value
    )


def test_a_package_that_cannot_be_imported_fails_the_load_and_is_named(folder: Path, packages: Path) -> None:
    (packages / "newest_scheduler.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(StartFailed) as caught, EmbeddedServer(write_model(folder)):
        pass
    assert (
        "scheduler 'newest_first' of package newest-scheduler 1.0 cannot be imported from "
        "'newest_scheduler:newest_first': ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    ) in str(caught.value)
