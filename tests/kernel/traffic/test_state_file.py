"""The file that keeps traffic rules over a restart."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from bench.server import wait_for
from kernel.errors import InvalidArgument
from kernel.traffic.state_file import FILENAME, StateFile

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_saved_last_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    keeper = StateFile(folder)
    assert keeper.read() == {}
    for number in range(200):
        keeper.save({"m": number})
    asyncio.run(keeper.close())
    assert os.listdir(folder) == [FILENAME], "nothing else is left"
    assert os.stat(folder / FILENAME).st_mode & 0o777 == 0o600, "rules can name clients"
    other = StateFile(folder)
    assert other.read() == {"m": 199}
    asyncio.run(other.close())


def test_a_document_without_models_is_written_as_any_other_and_the_next_one_too(tmp_path: Path) -> None:
    keeper = StateFile(tmp_path)
    for document in ({"m": 1}, {}, {"m": 2}):
        keeper.save(document)
        wait_for(lambda document=document: keeper.read() == document)  # type: ignore[misc]
    asyncio.run(keeper.close())


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_file_that_no_server_has_written_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILENAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    keeper = StateFile(tmp_path)
    with pytest.raises(InvalidArgument, match="is not what the server has written"):
        keeper.read()
    asyncio.run(keeper.close())


def test_a_file_that_is_cut_anywhere_is_refused_and_what_was_being_written_is_not_read(tmp_path: Path) -> None:
    keeper = StateFile(tmp_path)
    keeper.save({"m": {"rule": {"weights": {"3": 1}}, "rollout": None, "history": []}})
    asyncio.run(keeper.close())
    content = (tmp_path / FILENAME).read_bytes()
    other = StateFile(tmp_path)
    for length in range(len(content)):
        (tmp_path / FILENAME).write_bytes(content[:length])
        with pytest.raises(InvalidArgument, match="Restore it, or remove it to begin without"):
            other.read()
    (tmp_path / FILENAME).write_bytes(content)
    (tmp_path / "traffic.new").write_bytes(content[:20])  # of a server that was killed
    assert other.read().keys() == {"m"}
    other.save({"m": 2})
    asyncio.run(other.close())
    assert (other.read(), os.listdir(tmp_path)) == ({"m": 2}, [FILENAME])


def test_a_file_that_cannot_be_written_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = StateFile(tmp_path)
    (tmp_path / "traffic.new").mkdir()
    keeper.save({"m": 1})
    asyncio.run(keeper.close())
    assert "cannot be written" in caplog.text
    assert json.loads(json.dumps(keeper.read())) == {}


def test_what_could_not_be_written_is_written_as_soon_as_that_is_possible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = StateFile(tmp_path, retry_s=0.01)
    (tmp_path / "traffic.new").mkdir()
    keeper.save({"m": 1})
    wait_for(lambda: "cannot be written" in caplog.text)
    keeper.save({"m": 2})
    (tmp_path / "traffic.new").rmdir()
    wait_for(lambda: keeper.read() == {"m": 2})
    asyncio.run(keeper.close())
    assert caplog.text.count("cannot be written") == 1, "once, not at each try"
    assert os.listdir(tmp_path) == [FILENAME]


def test_a_disk_that_is_full_keeps_the_old_file_and_no_part_of_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = StateFile(tmp_path)
    keeper.save({"m": 1})
    wait_for(lambda: keeper.read() == {"m": 1})
    (tmp_path / "traffic.new").symlink_to("/dev/full")
    keeper.save({"m": 2})
    wait_for(lambda: "No space left on device" in caplog.text)
    assert (keeper.read(), os.listdir(tmp_path)) == ({"m": 1}, [FILENAME])
    asyncio.run(keeper.close())
    assert (keeper.read(), os.listdir(tmp_path)) == ({"m": 2}, [FILENAME]), "the end of the server tries once more"
