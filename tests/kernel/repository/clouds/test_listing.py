"""Objects of a store as files and folders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernel.repository.clouds.listing import entries_of, files_of, folders_of
from kernel.repository.clouds.messages import StoredObject
from kernel.repository.layout import Entry, find_models


def listed(*names: str) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    return entries_of(StoredObject(name, len(name), f"etag of {name}", 7) for name in names)


def test_objects_become_a_repository() -> None:
    entries, left_out = listed("m/config.pbtxt", "m/1/model.onnx", "m/1/data/w.bin", "m/2/", "top.txt")
    assert left_out == ()
    found = find_models({"s3://bucket": entries})
    assert list(found.models) == ["m"]
    assert list(found.models["m"].versions) == [1, 2]
    assert found.models["m"].path == "s3://bucket/m"
    assert found.models["m"].config_path() == "s3://bucket/m/config.pbtxt"
    assert found.models["m"].config_path(copy="/tmp/copy") == "/tmp/copy/config.pbtxt"
    files = files_of(found.models["m"].entry)
    assert sorted(files) == ["1/data/w.bin", "1/model.onnx", "config.pbtxt"]
    assert files["1/model.onnx"] == Entry("model.onnx", modified_ns=7, etag="etag of m/1/model.onnx", byte_size=14)
    assert folders_of(found.models["m"].entry) == ["1", "1/data", "2"]


def test_a_changed_object_changes_the_folder_of_its_model() -> None:
    before, after = (
        entries_of([StoredObject("m/1/a", 1, etag, 7), StoredObject("n/1/a", 1, "same", 7)])[0] for etag in "xy"
    )
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_what_no_path_can_be_is_left_out() -> None:
    names = [
        "../up",
        "m/../../up",
        "/root",
        "m//a",
        "m/./a",
        "m/a\0b",
        "m\\a",
        "m/a?versionId=1",
        "m/a\ud800",
        "m\udcff/config.pbtxt",
        "a" * 256,
        "/".join("a" * 101),
    ]
    entries, left_out = listed("m/1/a", *names)
    assert sorted(left_out) == sorted(names)
    assert [entry.name for entry in entries] == ["m"]


def test_of_a_file_and_a_folder_with_one_name_the_folder_stays() -> None:
    entries, left_out = listed("m/1", "m/1/model.onnx", "n")
    assert left_out == ("m/1",)
    assert sorted(files_of(Entry("", children=entries))) == ["m/1/model.onnx", "n"]


def test_files_of_the_interpreter_are_no_part_of_a_model() -> None:
    assert listed("m/1/__pycache__/model.cpython-311.pyc", "m/1/model.py")[0] == listed("m/1/model.py")[0]


@given(st.lists(st.text(alphabet="ab./\\\0", max_size=8), max_size=12))
def test_every_path_stays_in_the_folder_and_every_object_is_a_path_or_left_out(names: list[str]) -> None:
    entries, left_out = listed(*names)
    top = Entry("", is_folder=True, children=entries)
    files = set(files_of(top))
    for path in [*files, *folders_of(top)]:
        assert not path.startswith("/")
        assert {"", ".", ".."}.isdisjoint(path.split("/"))
    plain = {name for name in names if not name.endswith("/")}
    assert files | (plain & set(left_out)) == plain
    assert files.isdisjoint(folders_of(top))
