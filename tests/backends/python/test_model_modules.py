"""Modules of one model are away while another model has its turn."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from backends.python.model_modules import ModelModules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.modules.clear()
    sys.modules.update(modules)
    sys.path[:] = path


def model(folder: Path, word: str) -> ModelModules:
    """Write a model with a module `same`, a package `parts` and a folder of names, and let it come in."""
    (folder / "1" / "parts").mkdir(parents=True)
    (folder / "1" / "same.py").write_text(f"WORD = {word!r}\n")
    (folder / "1" / "parts" / "__init__.py").write_text(f"WORD = {word!r}\n")
    (folder / "1" / "names").mkdir()
    (folder / "1" / "names" / "deep.py").write_text(f"WORD = {word!r}\n")
    found = ModelModules(folder)
    found.enter()
    sys.path.append(str(folder / "1"))
    return found


NAMES = ("same", "parts", "names.deep")


def words() -> list[str]:
    return [importlib.import_module(name).WORD for name in NAMES]


def test_each_model_finds_its_own_modules(tmp_path: Path) -> None:
    first = model(tmp_path / "first", "one")
    assert words() == ["one"] * 3
    one = sys.modules["same"]
    first.leave()
    assert not {"same", "parts", "names", "names.deep"} & sys.modules.keys()
    second = model(tmp_path / "second", "two")
    assert words() == ["two"] * 3
    second.leave()
    first.enter()
    assert words() == ["one"] * 3
    assert sys.modules["same"] is one, "a module is imported once"


def test_a_module_that_is_imported_late_leaves_too(tmp_path: Path) -> None:
    first = model(tmp_path / "first", "one")
    first.leave()
    first.enter()
    assert words() == ["one"] * 3
    first.leave()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("same")


def test_modules_of_libraries_stay(tmp_path: Path) -> None:
    first = model(tmp_path / "first", "one")
    (tmp_path / "library.py").write_text("WORD = 'shared'\n")
    sys.path.append(str(tmp_path))
    library = importlib.import_module("library")
    first.leave()
    assert sys.modules["library"] is library
    assert str(tmp_path) in sys.path


def test_a_folder_whose_name_begins_alike_is_another_one(tmp_path: Path) -> None:
    first = model(tmp_path / "model", "one")
    second = model(tmp_path / "model_two", "two")
    assert words() == ["one"] * 3  # both are in the path, the first one before the second
    second.leave()
    assert "same" in sys.modules
    first.leave()
    assert "same" not in sys.modules


def test_what_libraries_put_among_the_modules_disturbs_nobody(tmp_path: Path) -> None:
    class Strange:
        @property
        def __path__(self) -> object:
            raise RuntimeError

    first = model(tmp_path / "first", "one")
    sys.modules["strange"] = Strange()  # type: ignore[assignment]
    sys.modules["refused"] = None  # type: ignore[assignment]
    first.leave()
    assert "strange" in sys.modules
