"""The processes that read clouds, against a store that speaks S3's protocol."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from kernel.repository.clouds import reader as module
from kernel.repository.clouds import stores
from kernel.repository.clouds.messages import (
    Download,
    ListFolders,
    ListObjects,
    Place,
    ReadObjects,
    StoredObject,
)
from kernel.repository.clouds.reader import CloudFailed, ReaderProcesses
from tests.child_processes import children_with
from tests.fake_s3.store import BUCKET, FakeS3

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

pytest.importorskip("s3fs", reason="the extra s3 is not installed")


@pytest.fixture
def store() -> Iterator[FakeS3]:
    with FakeS3() as store:
        yield store


def place(store: FakeS3, folder: str = "repo") -> Place:
    arguments = {"endpoint_url": f"http://127.0.0.1:{store.port}", "key": "key-of-user", "secret": "secret-of-user"}
    return Place("s3", f"{BUCKET}/{folder}" if folder else BUCKET, arguments)


def run(scenario: Callable[[ReaderProcesses], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        reader = ReaderProcesses()
        try:
            await scenario(reader)
        finally:
            await reader.close()
        assert children() == []

    asyncio.run(main())


def children() -> list[int]:
    """Return the processes that read clouds and were started by this one."""
    return children_with("kernel.repository.clouds.process")


def test_a_store_is_listed_read_and_copied(store: FakeS3, tmp_path: Path) -> None:
    store.put("repo/m/1/model.bin", "x" * 100_000)
    store.put("repo/m/config.pbtxt", "config")
    store.put("repo/m/empty", "")
    store.put("repo/n/2/", "")
    store.put("report/other", "not in the folder")
    for number in range(120):  # several pages
        store.put(f"repo/many/1/{number:03}", str(number))

    async def scenario(reader: ReaderProcesses) -> None:
        found = await reader.ask(ListObjects(place(store)), list[StoredObject])
        sizes = {each.name: each.byte_size for each in found if not each.name.endswith("/")}
        assert len(sizes) == 123
        assert sizes["m/1/model.bin"] == 100_000
        assert {each.etag for each in found if each.name == "many/1/007"} != {""}
        assert len({each.etag for each in found if each.name in ("many/1/007", "many/1/008")}) == 2
        assert any(each.name == "n/2/" for each in found)
        inner = await reader.ask(ListObjects(place(store), "m"), list[StoredObject])
        assert {each.name for each in inner if not each.name.endswith("/")} == {"1/model.bin", "config.pbtxt", "empty"}
        assert await reader.ask(ListObjects(place(store), "absent"), list[StoredObject]) == []
        assert await reader.ask(ListFolders(place(store)), list[str]) == ["m", "many", "n"]
        contents = await reader.ask(ReadObjects(place(store), ["m/config.pbtxt", "m/empty"]), list[bytes])
        assert contents == [b"config", b""]
        incoming = tmp_path / "incoming"
        incoming.mkdir()
        files = {name: str(tmp_path / name.replace("/", "-")) for name in ("m/1/model.bin", "m/empty")}
        received: list[int] = []
        await reader.ask(Download(place(store), files, sizes, str(incoming)), None, received.append)
        assert (tmp_path / "m-1-model.bin").read_text() == "x" * 100_000
        assert (tmp_path / "m-empty").read_text() == ""
        assert list(incoming.iterdir()) == []
        assert received
        assert len(children()) == 1  # one after the other, they need one process

    run(scenario)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (403, "access was denied"),
        (404, "there is no such bucket or object"),
        (500, "InternalError"),
        ("html", "Error"),
        ("redirect", "Error"),
    ],
)
def test_a_listing_that_fails_says_why_without_secrets(store: FakeS3, trouble: int | str, message: str) -> None:
    store.put("repo/m/1/x", "x")
    store.troubles[""] = trouble

    async def scenario(reader: ReaderProcesses) -> None:
        with pytest.raises(CloudFailed) as raised:
            await reader.ask(ListObjects(place(store)), list[StoredObject])
        assert message in str(raised.value)
        assert "of-user" not in str(raised.value)
        store.troubles.clear()
        assert await reader.ask(ListFolders(place(store)), list[str]) == ["m"]

    run(scenario)


def test_a_bucket_and_a_folder_that_are_not_there_are_errors(store: FakeS3) -> None:
    async def scenario(reader: ReaderProcesses) -> None:
        with pytest.raises(CloudFailed, match="there is no such bucket or object"):
            await reader.ask(ListObjects(place(store, "absent")), list[StoredObject])
        elsewhere = Place("s3", "absent/repo", place(store).arguments)
        with pytest.raises(CloudFailed, match="there is no such bucket or object"):
            await reader.ask(ListObjects(elsewhere), list[StoredObject])
        nobody = Place("s3", "models/repo", {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"})
        with pytest.raises(CloudFailed, match="the store cannot be reached"):
            await reader.ask(ListObjects(nobody), list[StoredObject])

    run(scenario)


@pytest.mark.parametrize("trouble", ["cut", "shorter", 403, 404])
def test_a_file_that_does_not_arrive_whole_fails_the_copy(store: FakeS3, tmp_path: Path, trouble: int | str) -> None:
    store.put("repo/m/1/x", "content")
    store.troubles["repo/m/1/x"] = trouble
    (tmp_path / "incoming").mkdir()

    async def scenario(reader: ReaderProcesses) -> None:
        request = Download(place(store), {"m/1/x": str(tmp_path / "x")}, {"m/1/x": 7}, str(tmp_path / "incoming"))
        with pytest.raises(CloudFailed):
            await reader.ask(request, None, lambda _: None)
        assert not (tmp_path / "x").exists()

    run(scenario)


def test_a_store_that_says_nothing_more_is_given_up(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_LIMIT_S", 0.01)
    store.troubles[""] = "stall"

    async def scenario(reader: ReaderProcesses) -> None:
        with pytest.raises(CloudFailed, match=r"nothing arrived for 0\.01 s"):
            await reader.ask(ListFolders(place(store)), list[str])

    run(scenario)


def test_a_cancelled_request_ends_its_process(store: FakeS3) -> None:
    store.troubles[""] = "stall"

    async def scenario(reader: ReaderProcesses) -> None:
        asking = asyncio.ensure_future(reader.ask(ListFolders(place(store)), list[str]))
        await asyncio.to_thread(store.met.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(scenario)


def test_a_process_that_was_killed_is_replaced(store: FakeS3) -> None:
    store.put("repo/m/1/x", "x")

    async def scenario(reader: ReaderProcesses) -> None:
        assert await reader.ask(ListFolders(place(store)), list[str]) == ["m"]
        [idle] = children()
        os.kill(idle, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, idle, os.WEXITED | os.WNOWAIT)
        assert await reader.ask(ListFolders(place(store)), list[str]) == ["m"]
        store.troubles[""] = "stall"
        asking = asyncio.ensure_future(reader.ask(ListFolders(place(store)), list[str]))
        await asyncio.to_thread(store.met.wait, 30)
        store.troubles.clear()
        [busy] = children()
        os.kill(busy, signal.SIGKILL)
        assert await asking == ["m"]

    run(scenario)


def test_a_folder_with_too_many_objects_is_refused(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_OBJECT_COUNT", 3)
    for number in range(4):
        store.put(f"repo/m/{number}", "x")
    with pytest.raises(stores.StoreError, match="objects, at most 3 are allowed"):
        stores.Stores().answer(ListObjects(place(store)), lambda _: None)
