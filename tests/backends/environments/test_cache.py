"""Environments in the cache: made once, kept while they are used, removed when there are too many bytes."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING

import pytest

from backends.environments import cache
from backends.environments.cache import EnvironmentCache, folder_byte_size
from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from pathlib import Path


class Lab:
    """A cache, and what was made and said."""

    def __init__(self, folder: Path, byte_size: int = 10_000) -> None:
        self.said: list[str] = []
        self.made: list[str] = []
        self.folder = folder
        self.cache = EnvironmentCache(folder, byte_size, self.said.append)

    def prepare(self, key: str, byte_size: int = 1000) -> Path:
        def make(folder: Path) -> None:
            self.made.append(key)
            (folder / "file").write_bytes(bytes(byte_size))

        return self.cache.prepare(key, f"/{key}.tar.gz", make).folder

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def use_long_ago(self, key: str, seconds: int) -> None:
        marker = self.folder / key / "naiad-environment.json"
        used = marker.stat().st_mtime - seconds
        os.utime(marker, (used, used))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "deep" / "cache")


def test_an_environment_is_made_once(lab: Lab) -> None:
    folder = lab.prepare("a")
    assert lab.prepare("a") == folder
    assert lab.made == ["a"]
    assert Lab(lab.folder).prepare("a") == folder


def test_those_go_first_that_were_not_used_for_the_longest_time(lab: Lab) -> None:
    for key, seconds in (("a", 30), ("b", 20), ("c", 10)):
        lab.prepare(key, 3000)
        lab.use_long_ago(key, seconds)
    lab.prepare("a")  # is used now
    lab.prepare("d", 3000)
    assert lab.names() == ["a", "c", "d"]
    assert lab.said == ["removing the environment of '/b.tar.gz', which was not used for the longest time"]
    lab.prepare("b", 3000)
    assert lab.made == ["a", "b", "c", "d", "b"]


def test_one_that_is_used_stays(lab: Lab) -> None:
    lab.prepare("a", 6000)
    with (lab.folder / "a.lock").open() as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        lab.prepare("b", 6000)
        assert lab.names() == ["a", "b"]
    lab.prepare("c", 6000)
    assert lab.names() == ["c"]


def test_one_that_is_larger_than_the_cache_is_refused_and_removed(lab: Lab) -> None:
    lab.prepare("a")
    with pytest.raises(EnvironmentFailed) as failure:
        lab.prepare("b", 20_000)
    assert str(failure.value) == (
        "the environment of '/b.tar.gz' has more than 10000 bytes, the limit of all environments "
        "(--environment-cache-byte-size)"
    )
    assert lab.names() == ["a"]


def test_nothing_is_left_of_one_that_cannot_be_made(lab: Lab) -> None:
    def fail(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise EnvironmentFailed("it is bad")

    with pytest.raises(EnvironmentFailed, match="it is bad"):
        lab.cache.prepare("a", "/a", fail)
    assert lab.names() == []
    lab.prepare("a")
    assert lab.names() == ["a"]


def test_an_error_of_the_system_names_the_source(lab: Lab) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentFailed, match="'/a' could not be made into an environment: .*No space left"):
        lab.cache.prepare("a", "/a", fail)


def test_what_a_killed_server_has_left_is_removed(lab: Lab) -> None:
    (lab.folder / "left").mkdir()
    (lab.folder / "left" / "file").write_text("half")
    (lab.folder / "a").mkdir()
    lab.prepare("a")
    assert lab.names() == ["a"]
    assert (lab.folder / "a" / "file").read_bytes() == bytes(1000)


def test_one_that_is_being_made_is_not_removed_by_another_server(lab: Lab) -> None:
    (lab.folder / "other").mkdir()
    with (lab.folder / "other.lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        lab.prepare("a")
    assert lab.names() == ["a", "other"]


def test_two_servers_at_once_make_it_once(lab: Lab) -> None:
    other = Lab(lab.folder)
    making, waiting = threading.Event(), threading.Event()

    def make(folder: Path) -> None:
        making.set()
        assert waiting.wait(60)
        (folder / "file").write_text("made")

    first = threading.Thread(target=lab.cache.prepare, args=("a", "/a", make))
    first.start()
    assert making.wait(60)

    def say(line: str) -> None:
        other.said.append(line)
        waiting.set()

    other.cache = EnvironmentCache(lab.folder, 10_000, say)
    assert (other.prepare("a") / "file").read_text() == "made"
    first.join()
    assert other.made == []
    assert other.said == ["another process makes the environment; waiting for it"]


def test_one_that_was_removed_while_a_worker_uses_it_is_an_error_and_no_endless_wait(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_LOOKS", 1)
    lab.prepare("a")
    with (lab.folder / "a.lock").open("w") as using:
        fcntl.flock(using, fcntl.LOCK_SH)
        lab.prepare("a")
        (lab.folder / "a" / "naiad-environment.json").unlink()
        with pytest.raises(EnvironmentFailed, match="was removed while it is used"):
            lab.prepare("a")
    lab.prepare("a")
    assert lab.made == ["a", "a"]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(EnvironmentFailed, match="others may write to it"):
        Lab(tmp_path / "cache")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EnvironmentFailed, match="cannot be created: .* Choose another one with --environment-cache-directory"
    ):
        Lab(tmp_path / "file" / "cache")


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(500))
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "link").symlink_to("a")
    assert folder_byte_size(tmp_path) == 500 + len("a")
