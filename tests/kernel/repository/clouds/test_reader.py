"""The processes that read clouds, against a store that speaks S3's protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import pytest

from kernel.repository.clouds import process
from kernel.repository.clouds import process as process_module
from kernel.repository.clouds import reader as module
from kernel.repository.clouds.messages import (
    MAX_ITEM_COUNT,
    Download,
    ListFolders,
    ListObjects,
    Place,
    ReadObjects,
    StoredObject,
)
from kernel.repository.clouds.process import StoreError
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
        contents = await reader.ask(
            ReadObjects(place(store), ["m/config.pbtxt", "m/empty", "m/gone"], [6, 0, 1]), list[bytes | None]
        )
        assert contents == [b"config", b"", None]
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
    monkeypatch.setattr(process, "MAX_OBJECT_COUNT", 3)
    for number in range(4):
        store.put(f"repo/m/{number}", "x")
    with pytest.raises(StoreError, match="the folder has more than 3 objects"):
        process.Stores().answer(ListObjects(place(store)), lambda _: None)


def test_long_work_shows_that_it_goes_on(store: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A request without a sign is ended after a while: each page of a listing is one, and each object."""
    monkeypatch.setattr(process, "PAGE_LENGTH", 50)
    for number in range(120):
        store.put(f"repo/m/{number:03}", "x")
    names = [f"m/{number:03}" for number in range(120)]
    signs: list[int] = []
    clients = process.Stores()
    found = clients.answer(ListObjects(place(store)), signs.append)
    assert [each.name for each in found] == names
    assert signs == [50, 100]
    signs.clear()
    assert clients.answer(ReadObjects(place(store), names, [1] * 120), signs.append) == [b"x"] * 120
    assert sorted(signs) == list(range(1, 121))
    store.fetched()


def test_a_long_listing_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each small enough for the kernel, and with the same types as a short one."""
    objects = [StoredObject(f"m/1/{number:05}", number, "etag", number) for number in range(2 * MAX_ITEM_COUNT + 1)]
    monkeypatch.setattr(process.Stores, "answer", lambda *_: objects)

    async def main(source: BinaryIO, target: BinaryIO, own: socket.socket) -> None:
        process = object.__new__(module.StoreProcess)
        process.socket, process.streams = own, None
        serving = asyncio.ensure_future(asyncio.to_thread(process_module.serve, source, target))
        request = msgspec.msgpack.encode(ListObjects(Place("s3", "bucket", {})))
        parts, failed = await process.ask(request, lambda _: None)
        assert failed is None
        assert [len(msgspec.msgpack.decode(part.value)) for part in parts] == [MAX_ITEM_COUNT, MAX_ITEM_COUNT, 1]
        assert await module.decoded_value(parts, list[StoredObject]) == objects
        assert process.streams is not None
        process.streams[1].close()
        await serving

    own, other = socket.socketpair()
    own.setblocking(False)
    fd = other.detach()
    with open(fd, "rb", buffering=0) as source, open(fd, "wb", closefd=False) as target:
        asyncio.run(main(source, target, own))


def test_a_process_ends_with_the_kernel_in_the_middle_of_a_request(store: FakeS3) -> None:
    store.put("repo/m/1/x", "content")
    store.troubles[""] = "stall"

    async def main() -> None:
        process = module.StoreProcess()
        content = msgspec.msgpack.encode(ListObjects(place(store)))
        asking = asyncio.ensure_future(process.ask(content, lambda _: None))
        try:
            await asyncio.to_thread(store.met.wait, 30)
            assert process.streams is not None
            process.streams[1].transport.abort()  # as the end of the kernel does
            with pytest.raises(module.Ended):
                await asking
            assert await asyncio.to_thread(process.process.wait, 30) == 0
        finally:
            process.end()
            process.wait()

    asyncio.run(main())


def test_a_request_that_runs_while_the_server_stops_starts_no_other_process(store: FakeS3) -> None:
    store.put("repo/m/1/x", "content")

    async def scenario(reader: ReaderProcesses) -> None:
        await reader.ask(ListFolders(place(store)), list[str])  # its process is idle now, and used again
        store.troubles[""] = "stall"
        asking = asyncio.ensure_future(reader.ask(ListObjects(place(store)), list[StoredObject]))
        await asyncio.to_thread(store.met.wait, 30)
        await reader.close()
        with pytest.raises(CloudFailed, match="the server stops"):
            await asking
        assert children() == []

    run(scenario)


def test_secrets_of_the_environment_and_signatures_are_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-of-user")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=sas-of-user")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-1")
    error = ValueError(
        "session-of-user, secret-of-user at https://a?sv=1&sig=sas-of-user and "
        "https://b?X-Amz-Signature=abc&X-Amz-Credential=key&X-Amz-Date=today in eu-1"
    )
    text = process.error_text(error, Place("s3", "bucket", {"secret": "secret-of-user"}))
    assert text == (
        "ValueError: ***, *** at https://a?*** and "
        "https://b?X-Amz-Signature=***&X-Amz-Credential=***&X-Amz-Date=today in eu-1"
    )
