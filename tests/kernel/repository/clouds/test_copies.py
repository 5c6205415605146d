"""Copies of models on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError
from kernel.repository.clouds import copies as module
from kernel.repository.clouds.copies import Copies, Copy, digest_of
from kernel.repository.clouds.listing import entries_of
from kernel.repository.clouds.messages import StoredObject

if TYPE_CHECKING:
    from kernel.repository.layout import Entry

ADDRESS = "s3://bucket/repo"


def model(**files: str) -> Entry:
    """Return a model with version 1 and these files: name → content, which is the etag, too."""
    found, _ = entries_of(StoredObject(f"m/1/{name}", len(content), content) for name, content in files.items())
    return found[0]


def make(copies: Copies, entry: Entry) -> tuple[Copy, list[str]]:
    """Make a whole copy; returns it and what had to be received."""
    partial = copies.begin(ADDRESS, "m", entry)
    received = sorted(partial.missing)
    for path in received:
        Path(partial.missing[path]).write_text(content_of(entry, path))
    return partial.finish(digest_of(entry), keep=copies.keeps), received


def content_of(entry: Entry, path: str) -> str:
    version = entry.child("1")
    assert version is not None
    file = version.child(path.removeprefix("1/"))
    assert file is not None
    return file.etag


def content(copy: Copy) -> dict[str, str]:
    return {str(path.relative_to(copy.path)): path.read_text() for path in Path(copy.path).rglob("*") if path.is_file()}


def folders(root: Path) -> list[str]:
    return [path.name for each in root.iterdir() for path in each.iterdir()]


def test_a_copy_has_the_files_and_is_removed_with_its_last_use() -> None:
    copies = Copies()
    copy, received = make(copies, model(a="one", b="two"))
    assert received == ["1/a", "1/b"]
    assert Path(copy.path).name == "m"
    assert content(copy) == {"1/a": "one", "1/b": "two"}
    again = copies.find(ADDRESS, "m", digest_of(model(a="one", b="two")))
    assert again is not None
    assert again.path == copy.path
    copy.retain()
    copy.release()
    copy.release()
    assert content(again) == {"1/a": "one", "1/b": "two"}
    again.release()
    assert not Path(copy.path).exists()
    root = Path(copy.path).parents[2]
    assert root.exists()
    copies.close()
    assert not root.exists()


def test_files_that_have_not_changed_are_linked() -> None:
    copies = Copies()
    first, _ = make(copies, model(a="one", b="two"))
    second, received = make(copies, model(a="one", b="three", c="four"))
    assert received == ["1/b", "1/c"]
    assert content(first) == {"1/a": "one", "1/b": "two"}
    assert content(second) == {"1/a": "one", "1/b": "three", "1/c": "four"}
    assert Path(first.path, "1/a").samefile(Path(second.path, "1/a"))
    first.release()
    assert content(second)["1/a"] == "one"
    second.release()
    copies.close()


def test_kept_copies_are_found_again_and_replace_those_that_nobody_uses(tmp_path: Path) -> None:
    copy, _ = make(Copies(str(tmp_path)), model(a="one"))
    copy.release()
    used = Copies(str(tmp_path)).find(ADDRESS, "m", digest_of(model(a="one")))
    assert used is not None
    assert content(used) == {"1/a": "one"}
    newer, _ = make(Copies(str(tmp_path)), model(a="two"))
    assert len(folders(tmp_path)) == 2  # another server uses the first one
    used.release()
    newer.release()
    newest, _ = make(Copies(str(tmp_path)), model(a="three"))
    assert folders(tmp_path) == [digest_of(model(a="three"))]
    newest.release()


def test_what_a_killed_server_has_received_is_used_and_removed(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    killed = copies.begin(ADDRESS, "m", model(a="one", b="two"))
    Path(killed.missing["1/a"]).write_text("one")
    Path(killed.incoming, "0").write_text("half")
    os.close(killed.fd)  # as the end of its process does
    copy, received = make(copies, model(a="one", b="two"))
    assert received == ["1/b"]
    assert content(copy) == {"1/a": "one", "1/b": "two"}
    assert folders(tmp_path) == [digest_of(model(a="one", b="two"))]
    copy.release()


def test_what_a_killed_server_has_received_goes_when_the_whole_copy_is_used(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    killed = copies.begin(ADDRESS, "m", model(a="one"))
    copy, _ = make(copies, model(a="one"))
    other = copies.begin(ADDRESS, "m", model(a="two"))  # which another server makes now
    os.close(killed.fd)  # as the end of its process does
    found = copies.find(ADDRESS, "m", digest_of(model(a="one")))
    assert found is not None
    assert len(folders(tmp_path)) == 2
    copy.release()
    found.release()
    other.abandon()
    assert folders(tmp_path) == [digest_of(model(a="one"))]


def test_a_copy_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    copy, _ = make(copies, model(a="one"))
    file = Path(copy.path, "1/a")
    copy.release()
    file.chmod(0o600)
    file.write_text("on")
    assert copies.find(ADDRESS, "m", digest_of(model(a="one"))) is None
    copy, received = make(copies, model(a="one"))
    assert received == ["1/a"]
    copy.release()


def test_two_servers_that_make_the_same_copy_share_it(tmp_path: Path) -> None:
    one, other = (Copies(str(tmp_path)) for _ in range(2))
    slower = one.begin(ADDRESS, "m", model(a="one"))
    first, _ = make(other, model(a="one"))
    Path(slower.missing["1/a"]).write_text("one")
    second = slower.finish(digest_of(model(a="one")), keep=True)
    assert second.path == first.path
    assert folders(tmp_path) == [digest_of(model(a="one"))]
    first.release()
    second.release()


def test_a_copy_is_not_begun_if_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESERVE_BYTE_SIZE", 1 << 60)
    with pytest.raises(InternalError, match="the model's files need 3 bytes more in .*, whose disk has"):
        Copies(str(tmp_path)).begin(ADDRESS, "m", model(a="one"))
    assert folders(tmp_path) == []


def test_room_is_promised_once_to_copies_that_are_made_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESERVE_BYTE_SIZE", 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=110))
    copies = Copies(str(tmp_path))
    first = copies.begin(ADDRESS, "m", model(a="123456"))
    with pytest.raises(InternalError, match="110 free, 6 are for other models that are being copied; 100 of them stay"):
        copies.begin(ADDRESS, "n", model(a="12345"))
    first.received_byte_size = 5  # these are no longer free
    copies.begin(ADDRESS, "n", model(a="12345")).abandon()
    first.abandon()
    copies.begin(ADDRESS, "n", model(a="1234567890")).abandon()


def test_a_copy_that_another_server_removes_as_it_is_begun_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of its folder and the lock of it, the folder looks like what a killed server has left."""
    mkdtemp, made = tempfile.mkdtemp, []

    def removed_at_once(prefix: str, dir: str) -> str:
        made.append(mkdtemp(prefix=prefix, dir=dir))
        if len(made) == 1:
            Copies(str(tmp_path)).remove_old(Path(dir))
            assert not Path(made[0]).exists()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_once)
    copy, _ = make(Copies(str(tmp_path)), model(a="one"))
    assert len(made) == 2
    assert content(copy) == {"1/a": "one"}
    copy.release()


def test_a_folder_that_takes_the_place_of_a_removed_one_stays(tmp_path: Path) -> None:
    """Another server has opened a copy that nobody uses; before it has the lock, the copy is removed and made again."""
    copies = Copies(str(tmp_path))
    old, _ = make(copies, model(a="one"))
    folder = Path(old.path).parent
    old.release()
    fd = os.open(folder, os.O_RDONLY)
    shutil.rmtree(folder)
    new, _ = make(copies, model(a="one"))
    assert Path(new.path).parent == folder
    module.remove_unused(folder, fd)
    os.close(fd)
    assert content(new) == {"1/a": "one"}
    new.release()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InternalError, match="failed to copy model 'm' to this machine: .*file"):
        Copies(str(tmp_path / "file" / "copies")).begin(ADDRESS, "m", model(a="one"))


def test_models_with_one_name_in_two_repositories_have_copies_of_their_own(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    for address in ("s3://a", "s3://b"):
        partial = copies.begin(address, "m", model(a="one"))
        assert list(partial.missing) == ["1/a"]
        partial.abandon()
    assert len(list(tmp_path.iterdir())) == 2
    assert folders(tmp_path) == []


def test_the_name_of_a_model_may_be_that_of_anything(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    for name in ("objects.json", "incoming", "a b/c"[:3], "modèle", "n" * 255):
        partial = copies.begin(ADDRESS, name, model(a="one"))
        Path(partial.missing["1/a"]).write_text("one")
        copy = partial.finish(digest_of(model(a="one")), keep=True)
        assert Path(copy.path).name == name
        copy.release()


def test_a_new_object_a_new_name_and_a_new_folder_change_the_digest() -> None:
    same = digest_of(model(a="one"))
    assert same == digest_of(model(a="one"))
    with_folder, _ = entries_of([StoredObject("m/1/a", 3, "one"), StoredObject("m/2/", 0, "")])
    assert len({same, digest_of(model(a="two")), digest_of(model(b="one")), digest_of(with_folder[0])}) == 4
