"""The script that prints the figures of the tree counts what it says, and figures that have reached zero stay there."""

from __future__ import annotations

import gc

import pytest

from tests.architecture.figures import (
    callers,
    circles_with_types,
    figures,
    importers_of_the_kernel,
    imports_of_tests,
    mutual_folders,
    private_names,
    private_patches,
    private_reads,
    replaced_methods,
)
from tests.architecture.source import planted, source_files


def test_a_replaced_method_is_found_and_one_of_another_library_is_not() -> None:
    text = "import ssl\nmodel.submit = f  # type: ignore[method-assign]\nssl.S.load = f  # type: ignore[method-assign]"
    assert list(replaced_methods([planted(text)])) == ["kernel/planted.py:2: model.submit"]
    assert list(replaced_methods([planted("model.on_closed = f")])) == []


def test_setattr_counts_as_a_replacement() -> None:
    assert list(replaced_methods([planted("setattr(model, name, f)")])) == [
        "kernel/planted.py:1: setattr(model, name, f)"
    ]


def test_a_door_that_names_the_kernel_for_types_only_is_found() -> None:
    text = "if TYPE_CHECKING:\n    from kernel.serving.kernel import Kernel"
    door = planted(text, "protocols/door.py")
    assert list(importers_of_the_kernel([door])) == ["protocols/door.py: kernel.serving.kernel"]
    assert list(importers_of_the_kernel([planted(text)])) == []


def test_a_circle_through_an_import_for_types_is_found() -> None:
    one = planted("if TYPE_CHECKING:\n    import kernel.startup", "kernel/errors.py")
    other = planted("import kernel.errors", "kernel/startup.py")
    alone = planted("import kernel.errors", "kernel/planted.py")
    assert circles_with_types([one, other, alone]) == [["kernel.errors", "kernel.startup"]]


def test_folders_that_import_each_other_are_found_but_not_a_folder_and_one_in_it() -> None:
    clock = planted("import shm.tensor", "kernel/loop/clock.py")
    tensor = planted("import kernel.loop.clock", "shm/tensor.py")
    assert [found.partition(":")[0] for found in mutual_folders([clock, tensor])] == ["kernel/loop and shm"]
    inside = planted("import kernel.errors", "kernel/loop/clock.py")
    outside = planted("import kernel.loop.clock", "kernel/errors.py")
    assert mutual_folders([inside, outside]) == []


def test_private_names_are_those_of_the_product_that_are_used_from_outside() -> None:
    text = "from kernel.app import _hidden\nself._timer\nlog._timer\ntorch._C\nmodule._MOST = 3\nlog.__dict__"
    found = private_reads([planted(text, "tests/planted.py")], frozenset({"_hidden", "_timer", "_MOST"}))
    assert [each.rpartition(": ")[2] for each in found] == ["_hidden", "log._timer", "module._MOST"]
    assert "_planted_only_here" not in private_names()
    assert {"_current", "_main"} & private_names()


def test_a_patch_of_a_private_name_is_found_whichever_way_it_is_named() -> None:
    text = "monkeypatch.setattr(module, '_MOST', 3)\npatch.setattr('kernel.x._MOST', 3)\nm.setattr(module, 'MOST', 3)"
    places = [each.partition(": ")[0] for each in private_patches([planted(text, "tests/planted.py")])]
    assert places == ["tests/planted.py:1", "tests/planted.py:2"]


def test_an_import_from_a_test_is_found_and_one_of_a_scaffold_is_not() -> None:
    text = "from tests.kernel.test_a import f\nfrom tests.kernel import test_b\nfrom tests.kernel.lab import Lab"
    places = [each.partition(": ")[0] for each in imports_of_tests([planted(text, "tests/planted.py")])]
    assert places == ["tests/planted.py:1", "tests/planted.py:2"]


#: What each figure may be at most. A change that lowers a figure lowers its limit; no change raises one. Only the tree
#: itself may grow with what it can do: up to so many modules and folders a newcomer still finds a file by its name.
LIMITS = {
    "methods of our objects that are replaced at run time": 0,
    "modules of protocols that import the kernel object or a model": 0,
    "places in protocols that submit a request": 1,
    "places in protocols that resolve a model for a request": 0,
    "pairs of folders that import each other at run time": 0,
    "circles of modules, imports for types included": 15,
    "modules in the largest of these circles": 5,
    "reads of private names of the product in tests": 74,
    "patches of private names in tests": 11,
    "imports of a test module in tests": 0,
    "modules": 620,
    "folders with modules": 70,
}


def test_no_figure_rises() -> None:
    found = {figure.title: figure for figure in figures()}
    risen = {title: found[title].places for title, limit in LIMITS.items() if found[title].number > limit}
    assert risen == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [("intake.kernel.submit(request)", 1), ("call = self._kernel.submit", 1), ("pool.submit(work)", 0)],
)
def test_a_place_that_submits_is_found_also_where_the_method_is_called_later(text: str, count: int) -> None:
    assert len(list(callers([planted(text, "protocols/door.py")], {"submit"}))) == count
    assert list(callers([planted(text)], {"submit"})) == []


def test_the_figures_are_those_of_the_tree() -> None:
    counts = {figure.title: figure.number for figure in figures()}
    assert counts["modules"] > counts["folders with modules"] > 0
    assert counts["statements"] > counts["modules"]


def test_collections_of_garbage_do_not_walk_through_the_trees() -> None:
    trees = {id(file.tree) for file in source_files()}
    assert not [each for each in gc.get_objects() if id(each) in trees]
