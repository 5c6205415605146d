"""What a launcher for other hosts gets of a model's files: names and digests that are the same on every host."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import Unavailable, Unsupported
from kernel.repository import described_files
from kernel.repository.described_files import (
    DescribedEnvironment,
    DescribedFile,
    FileDigests,
    LaunchDescription,
    describe_launch,
)
from kernel.repository.execution_environment import ExecutionEnvironment
from kernel.repository.worker_needs import WorkerNeeds, worker_needs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def made(folder: Path, files: Mapping[str, str]) -> WorkerNeeds:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return WorkerNeeds(folder=str(folder), version=2)


FILES = {"config.pbtxt": "c", "labels.txt": "l", "2/model.py": "two", "2/parts/data.bin": "d"}


def test_each_file_has_its_relative_name_its_size_and_its_digest(tmp_path: Path) -> None:
    found = describe_launch(made(tmp_path / "m", FILES))
    assert [file.name for file in found.files] == sorted(FILES)
    assert found.files[0] == DescribedFile("2/model.py", 3, hashlib.sha256(b"two").hexdigest())
    assert str(tmp_path) not in msgspec.json.encode(found).decode()
    assert msgspec.json.decode(msgspec.json.encode(found), type=LaunchDescription) == found


def test_equal_files_have_one_description_in_any_folder(tmp_path: Path) -> None:
    one, other = describe_launch(made(tmp_path / "a", FILES)), describe_launch(made(tmp_path / "x/b", FILES))
    assert one == other
    changed = describe_launch(made(tmp_path / "a", {"labels.txt": "L"}))
    assert changed.digest != one.digest


def test_other_versions_are_left_out_and_folders_that_are_no_versions_are_not(tmp_path: Path) -> None:
    needs = made(tmp_path, {**FILES, "1/model.py": "one", "03/model.py": "three", "configs/a.pbtxt": "a", "2/7/x": "x"})
    assert [file.name for file in describe_launch(needs).files] == sorted([*FILES, "configs/a.pbtxt", "2/7/x"])
    assert "03/model.py" in [file.name for file in describe_launch(msgspec.structs.replace(needs, version=3)).files]


def test_links_are_followed_and_whether_a_file_can_be_executed_is_known(tmp_path: Path) -> None:
    made(tmp_path / "shared", {"weights": "w", "folder/more": "m"})
    needs = made(tmp_path / "m", {"2/run": "#!"})
    (tmp_path / "m/2/run").chmod(0o755)
    (tmp_path / "m/2/weights").symlink_to(tmp_path / "shared/weights")
    (tmp_path / "m/2/folder").symlink_to(tmp_path / "shared/folder")
    found = {file.name: file for file in describe_launch(needs).files}
    assert set(found) == {"2/run", "2/weights", "2/folder/more"}
    assert found["2/weights"].digest == hashlib.sha256(b"w").hexdigest()
    assert [found[name].executable for name in ("2/run", "2/weights")] == [True, False]


def test_a_preload_and_requirements_are_named_in_the_folder(tmp_path: Path) -> None:
    made(tmp_path, {**FILES, "preload.py": "import json", "2/requirements.txt": "x"})
    config = ModelConfig(name="m", backend="python")
    config.parameters["naiad.preload"].string_value = "json"
    needs = worker_needs(config, str(tmp_path), version=2)
    found = describe_launch(needs)
    assert (found.preload_modules, found.preload_file) == (("json",), "preload.py")
    assert found.environment is None
    installed = msgspec.structs.replace(
        needs, environment=ExecutionEnvironment(requirements=str(tmp_path / "2/requirements.txt"))
    )
    assert describe_launch(installed).environment == DescribedEnvironment(requirements="2/requirements.txt")


def test_an_archive_of_an_environment_is_described_wherever_it_lies(tmp_path: Path) -> None:
    needs = made(tmp_path / "m", {**FILES, "env.tar.gz": "in"})
    made(tmp_path, {"elsewhere/env.tar.gz": "out", "unpacked/bin/python": "p"})

    def environment(path: Path) -> DescribedEnvironment | None:
        return describe_launch(msgspec.structs.replace(needs, environment=ExecutionEnvironment(str(path)))).environment

    assert environment(tmp_path / "m/env.tar.gz") == DescribedEnvironment("env.tar.gz")
    outside = DescribedFile("env.tar.gz", 3, hashlib.sha256(b"out").hexdigest())
    assert environment(tmp_path / "elsewhere/env.tar.gz") == DescribedEnvironment("env.tar.gz", elsewhere=outside)
    with pytest.raises(Unsupported, match="is a folder outside the model's.*conda-pack"):
        environment(tmp_path / "unpacked")


def test_what_cannot_be_brought_to_another_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = made(tmp_path, FILES)
    os.mkfifo(tmp_path / "2/pipe")
    with pytest.raises(Unavailable, match=r"2/pipe' cannot be read: it is a FIFO"):
        describe_launch(needs)
    (tmp_path / "2/pipe").unlink()
    (tmp_path / "2/gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(Unavailable, match="2/gone' cannot be read: No such file"):
        describe_launch(needs)
    (tmp_path / "2/gone").unlink()
    (tmp_path / "2/again").symlink_to(tmp_path)
    with pytest.raises(Unsupported, match="2/again' leads to a folder that it is in"):
        describe_launch(needs)
    (tmp_path / "2/again").unlink()
    monkeypatch.setattr(described_files, "MAX_FILES", 3)
    with pytest.raises(Unsupported, match="has more than 3 files"):
        describe_launch(needs)


def test_needs_of_a_worker_are_made_without_reading_the_files_of_the_model(tmp_path: Path) -> None:
    made(tmp_path, FILES)
    os.mkfifo(tmp_path / "2/pipe")  # whatever opens it waits without end, or fails
    assert worker_needs(ModelConfig(name="m"), str(tmp_path)).folder == str(tmp_path)


def test_a_file_that_has_not_changed_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digests = FileDigests(now_ns=lambda: time.time_ns() + 10**10)

    def read() -> int:
        with file.open("rb") as opened:
            assert digests.digest(opened, str(file)) == hashlib.sha256(file.read_bytes()).hexdigest()
            return opened.tell()

    assert [read(), read()] == [3, 0]
    other = tmp_path / "other"
    other.write_bytes(b"two")
    times = file.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)  # the same size and time of change
    assert [read(), read()] == [3, 0]


def test_a_file_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    born_ns = file.stat().st_ctime_ns
    digests = FileDigests(now_ns=lambda: born_ns + 10**9)
    for _ in range(2):
        with file.open("rb") as opened:
            digests.digest(opened, str(file))
            assert opened.tell() == 3


def test_only_so_many_digests_are_remembered_and_the_latest(tmp_path: Path) -> None:
    digests = FileDigests(2, now_ns=lambda: time.time_ns() + 10**10)

    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    read_now = [read_of(digests, tmp_path / name) for name in "abacacb"]
    assert read_now == [True, True, False, True, False, False, True]


def read_of(digests: FileDigests, path: Path) -> bool:
    """Return whether a file was read for its digest."""
    with path.open("rb") as opened:
        digests.digest(opened, str(path))
        return opened.tell() > 0
