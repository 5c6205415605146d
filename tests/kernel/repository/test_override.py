"""What a load request may bring, and where its files may go."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument
from kernel.repository import override
from kernel.repository.override import (
    MAX_CONFIG_BYTE_SIZE,
    LoadParameters,
    OverrideFolder,
    UnusableParameters,
    file_paths,
    parse_load_parameters,
)


def test_a_configuration_and_files_are_told_apart() -> None:
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
def test_other_parameters_are_refused_with_tritons_text(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableParameters) as caught:
        parse_load_parameters(parameters)
    assert caught.value.message == message


def test_what_is_too_large_is_refused_before_anything_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="^load parameter 'config' has 262145 characters, at most 262144 are"):
        parse_load_parameters({"config": " " * (MAX_CONFIG_BYTE_SIZE + 1)})
    monkeypatch.setattr(override, "MAX_FILES_BYTE_SIZE", 10)
    parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(5)})
    with pytest.raises(InvalidArgument, match="^the files of a load request have 11 bytes, at most 10 are allowed$"):
        parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(6)})


def test_files_go_below_the_folder_whatever_their_names_look_like() -> None:
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


def test_a_file_cannot_be_the_folder_of_another() -> None:
    for names in (["1", "1/model.py"], ["1/model.py", "1"]):
        with pytest.raises(UnusableParameters) as caught:
            file_paths(names, "/tmp/m")
        assert caught.value.message == "Invalid file parameter 'file:1/model.py', directory has been created as a file"


def test_the_folder_is_there_until_its_last_user_goes() -> None:
    folder = OverrideFolder({"1/model.py": b"code", "labels.txt": b"a"})
    root = Path(folder.path)
    assert (root / "1" / "model.py").read_bytes() == b"code"
    assert root.stat().st_mode & 0o077 == 0, "others can read it"
    folder.retain()
    folder.release()
    assert root.is_dir()
    folder.release()
    assert not root.exists()


@pytest.mark.parametrize(("files", "error"), [({"../x": b""}, UnusableParameters), ({"a" * 300: b""}, InternalError)])
def test_nothing_is_left_of_a_folder_that_cannot_be_filled(
    files: dict[str, bytes], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error):
        OverrideFolder(files)
    assert list(tmp_path.iterdir()) == []
