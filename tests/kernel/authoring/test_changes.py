"""A model is loaded again when its files have changed and are quiet."""

from __future__ import annotations

from kernel.authoring.changes import QUIET_NS, ChangeWatch, files_of
from kernel.repository.layout import Entry


def folder(name: str, *children: Entry) -> Entry:
    return Entry(name, is_folder=True, children=children)


def test_files_of_editors_caches_and_tests_are_not_the_models() -> None:
    names = ("model.py", "model.py~", ".model.py.swp", "4913", "#model.py#", "x.pyc", "test_model.py", "test.txt")
    entry = folder("double", Entry("config.pbtxt", modified_ns=1), folder("1", *(Entry(name) for name in names)))
    assert files_of([entry, folder(".git", Entry("HEAD"))]) == {
        "double/config.pbtxt": 1,
        "double/1/model.py": 0,
        "double/1/test.txt": 0,
    }


def test_a_change_is_seen_once_when_it_is_quiet() -> None:
    watch = ChangeWatch({"a": 1})
    assert watch.look({"a": 1}, 0) == []
    assert watch.look({"a": 2}, 10) == []
    assert watch.look({"a": 2}, 9 + QUIET_NS) == []
    assert watch.look({"a": 2}, 10 + QUIET_NS) == ["a"]
    assert watch.look({"a": 2}, 10 + 2 * QUIET_NS) == []


def test_a_file_that_changes_again_begins_the_wait_again() -> None:
    watch = ChangeWatch({"a": 1})
    watch.look({"a": 2}, 0)
    assert watch.look({"a": 3}, QUIET_NS) == []
    assert watch.look({"a": 3}, 2 * QUIET_NS) == ["a"]


def test_new_and_removed_files_are_named() -> None:
    watch = ChangeWatch({"a": 1, "b": 1})
    watch.look({"b": 1, "c": 1}, 0)
    assert watch.look({"b": 1, "c": 1}, QUIET_NS) == ["a", "c"]


def test_a_change_that_is_taken_back_is_none() -> None:
    watch = ChangeWatch({"a": 1})
    watch.look({"a": 2}, 0)
    watch.look({"a": 1}, 5)
    assert watch.look({"a": 1}, 5 + QUIET_NS) == []
