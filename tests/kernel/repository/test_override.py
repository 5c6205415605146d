"""The parameters of a load request, and the paths of its files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument
from kernel.repository import override
from kernel.repository.override import (
    MAX_CONFIG_BYTE_SIZE,
    MAX_PATH_DEPTH,
    LoadParameters,
    OverrideFolder,
    UnusableParameters,
    file_paths,
    parse_load_parameters,
)


def test_load_parameters_are_split_in_configuration_and_files() -> None:
    assert parse_load_parameters({}) == LoadParameters()
    assert parse_load_parameters({"config": "{}"}) == LoadParameters("{}")
    assert parse_load_parameters({"config": "{}", "file:1/model.py": b"x", "file:": b""}) == LoadParameters(
        "{}", {"1/model.py": b"x", "": b""}
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"file:a": b""}, "Load parameter 'config' must be specified for model file override"),
        ({"config": "{}", "file:a": "text"}, "File parameter 'file:a' must have bytes type for its value"),
        ({"config": b"{}", "file:a": b""}, "Config parameter 'config' must have string type for its value"),
        ({"config": b"{}"}, "Unrecognized load parameter 'config' with type 'BYTES'"),
        ({"other": "x"}, "Unrecognized load parameter 'other' with type 'STRING'"),
        ({"other": 1}, "Unrecognized load parameter 'other' with type 'INT'"),
        ({"other": True}, "Unrecognized load parameter 'other' with type 'BOOL'"),
    ],
)
def test_wrong_load_parameters_are_refused_with_tritons_text(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableParameters) as caught:
        parse_load_parameters(parameters)
    assert caught.value.message == message


def test_load_parameters_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="^load parameter 'config' has 262145 characters, at most 262144 are"):
        parse_load_parameters({"config": " " * (MAX_CONFIG_BYTE_SIZE + 1)})
    monkeypatch.setattr(override, "MAX_FILES_BYTE_SIZE", 10)
    parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(5)})
    with pytest.raises(InvalidArgument, match="^the files of a load request have 11 bytes, at most 10 are allowed$"):
        parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(6)})


@pytest.mark.parametrize("separator", ["/", "//", "/../b/"])
def test_a_path_of_many_folders_is_refused_before_a_folder_is_made(separator: str) -> None:
    parse_load_parameters({"config": "{}", f"file:{'a/' * MAX_PATH_DEPTH}x": b""})
    with pytest.raises(
        InvalidArgument, match=r"^the path of file parameter 'file:a/.* folders, at most 32 are allowed$"
    ):
        parse_load_parameters({"config": "{}", f"file:{separator.join('a' * (MAX_PATH_DEPTH + 2))}": b""})


@pytest.mark.parametrize("path", ["x" * 1025, "a/" * 100_000 + "x", "é" * 513])
def test_a_long_path_is_refused_and_the_error_is_short(path: str) -> None:
    with pytest.raises(InvalidArgument, match=r" bytes, at most 1024 are allowed$") as caught:
        parse_load_parameters({"config": "{}", f"file:{path}": b""})
    assert len(caught.value.text.encode()) < 1200


def test_paths_of_files_are_normalised_inside_the_folder() -> None:
    names = ["1/model.py", "/1/other.py", "./x/../labels.txt", "1//deep/./er"]
    assert file_paths(names, "/tmp/m") == {
        "1/model.py": "/tmp/m/1/model.py",
        "/1/other.py": "/tmp/m/1/other.py",
        "./x/../labels.txt": "/tmp/m/labels.txt",
        "1//deep/./er": "/tmp/m/1/deep/er",
    }


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "", ".", "/", "../m2/x", "a/../../m2/x", "a\0b"])
def test_a_file_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UnusableParameters, match="^Invalid file parameter 'file:.* must stay within model directory"):
        file_paths([name], "/tmp/m")


def test_a_file_that_is_the_folder_of_another_is_refused() -> None:
    for names in (["1", "1/model.py"], ["1/model.py", "1"]):
        with pytest.raises(UnusableParameters) as caught:
            file_paths(names, "/tmp/m")
        assert caught.value.message == "Invalid file parameter 'file:1/model.py', directory has been created as a file"


def test_the_folder_is_removed_with_its_last_use() -> None:
    folder = OverrideFolder({"1/model.py": b"code", "labels.txt": b"a"})
    root = Path(folder.path)
    assert (root / "1" / "model.py").read_bytes() == b"code"
    assert root.stat().st_mode & 0o077 == 0, "other users can read the folder"
    folder.retain()
    folder.release()
    assert root.is_dir()
    folder.release()
    assert not root.exists()


@pytest.mark.parametrize(("files", "error"), [({"../x": b""}, UnusableParameters), ({"a" * 300: b""}, InternalError)])
def test_a_folder_that_cannot_be_filled_is_removed(
    files: dict[str, bytes], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error):
        OverrideFolder(files)
    assert list(tmp_path.iterdir()) == []
