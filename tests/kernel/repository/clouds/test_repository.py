"""A repository in a cloud, with a store in memory.

Versions of a model in a cloud that serve on while other parts of the model change.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError
from kernel.repository.clouds import repository as module
from kernel.repository.clouds.address import parse_address
from kernel.repository.clouds.copies import Copies, PartialCopy
from kernel.repository.clouds.messages import Download, ListFolders, ListObjects, Place, ReadObjects, StoredObject
from kernel.repository.clouds.reader import CloudFailed, StoreFailed
from kernel.repository.clouds.repository import CloudRepository
from kernel.repository.ensembles import parts_by_name
from kernel.repository.layout import ModelFolder, find_models
from kernel.repository.repositories import Repositories
from kernel.repository.settings import LifecycleSettings
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled, until
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.repository.clouds.messages import Request

PLACE = Place("s3", "bucket/repo", {})


class MemoryReader:
    """Implements `CloudReader` over objects in memory."""

    def __init__(self, **objects: str) -> None:
        self.objects = {name.replace("__", "/"): content for name, content in objects.items()}
        self.asked: list[Request] = []
        self.failure = ""
        #: Called in the middle of each download.
        self.while_copying: Callable[[], None] = lambda: None
        self.gate: asyncio.Event | None = None

    async def ask(self, request: Request, kind: Any, progress: Callable[[int], None] | None = None) -> Any:
        self.asked.append(request)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure:
            raise CloudFailed(self.failure)
        match request:
            case ListObjects(folder=folder):
                begin = f"{folder}/" if folder else ""
                return [
                    StoredObject(name[len(begin) :], len(text), hashlib.md5(text.encode()).hexdigest())
                    for name, text in self.objects.items()
                    if name.startswith(begin)
                ]
            case ListFolders():
                return sorted({name.partition("/")[0] for name in self.objects if "/" in name})
            case ReadObjects(names=names):
                return [self.objects[name].encode() if name in self.objects else None for name in names]
            case Download(files=files):
                for name, path in files.items():
                    if name not in self.objects:
                        self.while_copying()
                        raise StoreFailed(f"there is no {name}")
                    Path(path).write_text(self.objects[name])
                if progress is not None:
                    progress(1)
                self.while_copying()
        return None

    def requests(self, kind: type[Request]) -> int:
        """Return how many requests of a kind there were, and forget them."""
        count = sum(isinstance(request, kind) for request in self.asked)
        self.asked.clear()
        return count

    async def close(self) -> None:
        pass


def new_repository(reader: MemoryReader, copies: Copies | None = None) -> CloudRepository:
    return CloudRepository(parse_address("s3://bucket/repo"), PLACE, reader, copies or Copies())


async def model_of(repository: CloudRepository, name: str = "m") -> ModelFolder:
    return find_models({repository.path: await repository.list_entries()}).models[name]


def test_configurations_are_read_when_they_are_new_or_have_changed() -> None:
    async def main() -> None:
        reader = MemoryReader(m__config="", n__1__model="x")
        reader.objects = {"m/config.pbtxt": "one", "m/configs/a.pbtxt": "a", "m/1/x": "", "n/1/x": "x"}
        repository = new_repository(reader)
        await repository.list_entries()
        assert reader.requests(ReadObjects) == 1
        assert repository.read_config("s3://bucket/repo/m/config.pbtxt") == b"one"
        assert repository.read_config("s3://bucket/repo/m/configs/a.pbtxt") == b"a"
        await repository.list_entries()
        await repository.list_entries("m")
        assert reader.requests(ReadObjects) == 0
        reader.objects["m/config.pbtxt"] = "two"
        await repository.list_entries("m")
        [request] = [each for each in reader.asked if isinstance(each, ReadObjects)]
        assert request.names == ["m/config.pbtxt"]
        assert repository.read_config("s3://bucket/repo/m/config.pbtxt") == b"two"
        del reader.objects["m/configs/a.pbtxt"]
        await repository.list_entries("m")
        assert repository.read_config("s3://bucket/repo/m/configs/a.pbtxt") is None
        assert repository.read_config("s3://bucket/repo/m/config.pbtxt") == b"two"

    asyncio.run(main())


def test_ensembles_are_found_without_copies() -> None:
    async def main() -> None:
        reader = MemoryReader()
        step = 'ensemble_scheduling { step [{ model_name: "part" }] }'
        reader.objects = {"e/config.pbtxt": step, "e/1/x": "", "part/1/x": "x"}
        repository = new_repository(reader)
        found = find_models({repository.path: await repository.list_entries()})
        parts = parts_by_name(found.models.values(), "", lambda path: repository.read_config(path) or b"")
        assert parts == {"e": ("part",)}
        assert reader.requests(Download) == 0

    asyncio.run(main())


def test_a_listing_of_a_model_that_is_not_there_is_empty() -> None:
    repository = new_repository(MemoryReader(m__1__x="x"))
    assert asyncio.run(repository.list_entries("other")) == ()
    [entry] = asyncio.run(repository.list_entries("m"))
    assert (entry.name, entry.is_folder) == ("m", True)


def test_names_are_asked_for_once_for_all_who_wait_and_not_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__x="x", n__1__x="x")
        reader.objects[".hidden/x"] = ""
        reader.gate = asyncio.Event()
        repository = new_repository(reader)
        waiting = [asyncio.ensure_future(repository.list_names()) for _ in range(5)]
        await asyncio.sleep(0)
        reader.gate.set()
        assert await asyncio.gather(*waiting) == [["m", "n"]] * 5
        assert await repository.list_names() == ["m", "n"]
        assert reader.requests(ListFolders) == 1
        monkeypatch.setattr(module, "NAMES_AGE_S", -1)
        reader.failure = "it is down"
        with pytest.raises(InternalError, match="failed to read model repository 's3://bucket/repo': it is down"):
            await repository.list_names()

    asyncio.run(main())


def test_each_listing_uses_the_present_credentials() -> None:
    async def main() -> None:
        reader, keys = MemoryReader(m__1__x="x"), iter("abcdef")

        def now() -> Place:
            return Place("s3", "bucket/repo", {"key": next(keys)})

        repository = CloudRepository(parse_address("s3://bucket/repo"), PLACE, reader, Copies(), None, now)
        await repository.list_names()
        await repository.list_entries()
        assert [each.place.arguments["key"] for each in reader.asked] == ["a", "b"]

    asyncio.run(main())


def test_a_failure_is_shared_by_all_who_wait() -> None:
    async def main() -> None:
        reader = MemoryReader()
        reader.gate = asyncio.Event()
        reader.failure = "it is down"
        repository = new_repository(reader)
        waiting = [asyncio.ensure_future(repository.list_names()) for _ in range(5)]
        await asyncio.sleep(0)
        reader.gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, InternalError) for result in results)
        assert reader.requests(ListFolders) == 1

    asyncio.run(main())


def test_a_model_is_copied_once_and_again_when_it_changes() -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__a="one", m__1__b="two")
        copies = Copies()
        repository = new_repository(reader, copies)
        _, first = await repository.copied(await model_of(repository))
        _, again = await repository.copied(await model_of(repository))
        assert reader.requests(Download) == 1
        assert first.path == again.path
        reader.objects["m/1/b"] = "three"
        _, second = await repository.copied(await model_of(repository))
        [request] = [each for each in reader.asked if isinstance(each, Download)]
        assert list(request.files) == ["m/1/b"]
        assert Path(second.path, "1/b").read_text() == "three"
        assert Path(first.path, "1/b").read_text() == "two"
        for copy in (first, again, second):
            copy.release()
        assert not Path(first.path).exists()
        copies.close()

    asyncio.run(main())


def test_a_model_that_changes_while_it_is_copied_is_copied_again() -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__a="one", m__1__b="x")
        copies = Copies()
        repository = new_repository(reader, copies)

        def change() -> None:
            reader.objects["m/1/a"] = "two"

        reader.while_copying = change
        _, copy = await repository.copied(await model_of(repository))
        assert Path(copy.path, "1/a").read_text() == "two"
        downloads = [list(each.files) for each in reader.asked if isinstance(each, Download)]
        assert downloads == [["m/1/a", "m/1/b"], ["m/1/a"]]
        copy.release()
        numbers = iter(range(100))
        reader.while_copying = lambda: reader.objects.update({"m/1/a": str(next(numbers))})
        reader.objects["m/1/a"] = "again"
        with pytest.raises(InternalError, match="model 'm' in 's3://bucket/repo' changes while it is copied"):
            await repository.copied(await model_of(repository))
        copies.close()

    asyncio.run(main())


def test_a_copy_that_fails_or_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__a="one")
        repository = new_repository(reader, Copies(str(tmp_path)))
        model = await model_of(repository)
        reader.failure = "it is down"
        with pytest.raises(InternalError, match="failed to copy model 'm' from 's3://bucket/repo': it is down"):
            await repository.copied(model)
        reader.failure, reader.gate = "", asyncio.Event()
        copying = asyncio.ensure_future(repository.copied(model))
        await until(lambda: isinstance(reader.asked[-1], Download))
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying

    asyncio.run(main())
    assert [path for each in tmp_path.iterdir() for path in each.iterdir()] == []


def test_a_model_that_loses_files_while_it_is_copied_is_copied_again() -> None:
    """A file that is gone, or that has another size, fails the copy: the reason is a change of the model."""

    async def main() -> None:
        reader = MemoryReader(m__1__a="one", m__1__b="x")
        copies = Copies()
        repository = new_repository(reader, copies)
        listed = await model_of(repository)
        del reader.objects["m/1/b"]
        reader.objects["m/2/c"] = "new"
        copied, copy = await repository.copied(listed)
        assert list(copied.versions) == [1, 2]  # what is loaded, not what was asked for
        assert sorted(path.name for path in Path(copy.path).rglob("*") if path.is_file()) == ["a", "c"]
        copy.release()
        listed = await model_of(repository)
        reader.objects.clear()
        with pytest.raises(InternalError, match="model 'm' was removed from 's3://bucket/repo' while it was copied"):
            await repository.copied(listed)
        copies.close()

    asyncio.run(main())


def test_a_file_that_cannot_be_received_and_has_not_changed_fails_the_copy_at_once() -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__a="one")
        repository = new_repository(reader)
        listed = await model_of(repository)
        del reader.objects["m/1/a"]
        reader.while_copying = lambda: reader.objects.update({"m/1/a": "one"})  # access to it was denied
        with pytest.raises(InternalError, match="failed to copy model 'm' from 's3://bucket/repo': there is no m/1/a"):
            await repository.copied(listed)
        assert reader.requests(Download) == 1

    asyncio.run(main())


def test_a_configuration_that_is_removed_after_the_listing_fails_no_other_model() -> None:
    async def main() -> None:
        class Removing(MemoryReader):
            async def ask(self, request: Request, kind: Any, progress: Callable[[int], None] | None = None) -> Any:
                if isinstance(request, ReadObjects):
                    self.objects.pop("m/config.pbtxt")
                return await super().ask(request, kind, progress)

        reader = Removing()
        reader.objects = {"m/config.pbtxt": "one", "n/config.pbtxt": "two"}
        repository = new_repository(reader)
        assert [entry.name for entry in await repository.list_entries()] == ["m", "n"]
        assert repository.read_config("s3://bucket/repo/m/config.pbtxt") is None
        assert repository.read_config("s3://bucket/repo/n/config.pbtxt") == b"two"

    asyncio.run(main())


def test_a_copy_reports_how_far_it_is() -> None:
    async def main() -> None:
        reader = MemoryReader(m__1__a="one", m__1__b="two")
        copies, reports = Copies(), []
        repository = new_repository(reader, copies)
        model = await model_of(repository)
        _, copy = await repository.copied(model, lambda *report: reports.append(report))
        assert reports == [(0, 6), (1, 6), (6, 6)]
        _, again = await repository.copied(model, lambda *report: reports.append(report))
        assert len(reports) == 3  # it is there
        copy.release()
        again.release()
        copies.close()

    asyncio.run(main())


def test_cancelled_copies_leave_nothing_whenever_they_are_cancelled(tmp_path: Path) -> None:
    """At the first event-loop iterations in turn, then at ever fewer: work of threads is waited for and undone."""

    async def main() -> int:
        reader, iterations = MemoryReader(m__1__a="one", m__1__b="two"), 0
        before = open_descriptors()
        while True:
            iterations += 1 + iterations // 8
            copies = Copies(str(tmp_path / str(iterations)))
            repository = new_repository(reader, copies)
            copying = asyncio.ensure_future(repository.copied(await model_of(repository)))
            for _ in range(iterations):
                await asyncio.sleep(0)
            copying.cancel()
            try:
                (await copying)[1].release()
            except asyncio.CancelledError:
                pass
            else:
                return iterations
            assert open_descriptors() <= before
            assert not list(tmp_path.glob(f"{iterations}/*/partial-*"))

    assert asyncio.run(main()) > 5


def test_a_copy_that_is_cancelled_twice_leaves_nothing(tmp_path: Path) -> None:
    """An unload and the stop of the server: what a thread has begun is undone all the same."""

    class Slow(Copies):
        begins, released, begun = threading.Event(), threading.Event(), threading.Event()

        def begin(self, *arguments: Any) -> PartialCopy:
            self.begins.set()
            self.released.wait(60)
            try:
                return super().begin(*arguments)
            finally:
                self.begun.set()

    async def main() -> None:
        reader, copies = MemoryReader(m__1__a="one"), Slow(str(tmp_path))
        repository = new_repository(reader, copies)
        before = open_descriptors()
        copying = asyncio.ensure_future(repository.copied(await model_of(repository)))
        await asyncio.to_thread(copies.begins.wait, 60)
        for _ in range(3):
            copying.cancel()
            await asyncio.sleep(0)
        copies.released.set()
        with pytest.raises(asyncio.CancelledError):
            await copying
        await asyncio.to_thread(copies.begun.wait, 60)
        await until(lambda: not list(tmp_path.glob("*/partial-*")) and open_descriptors() <= before)

    asyncio.run(main())


def test_a_repository_within_the_folder_of_another_one_is_told_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        outer, inner = MemoryReader(), MemoryReader()
        outer.objects = {"x/config.pbtxt": "outer", "x/m/1/a": "no model"}
        inner.objects = {"m/config.pbtxt": "inner", "m/1/a": "inner"}
        both = Repositories([])
        for address, reader in (("s3://bucket", outer), ("s3://bucket/x", inner)):
            both.add(CloudRepository(parse_address(address), PLACE, reader, Copies()))
        found = await both.scan()
        _, copy = await both.copied(found.models["m"])
        assert copy is not None
        assert Path(copy.path, "1/a").read_text() == "inner"
        assert both.read_config("s3://bucket/x/m/config.pbtxt") == b"inner"
        assert both.read_config("s3://bucket/x/config.pbtxt") == b"outer"
        copy.release()

    asyncio.run(main())


def new_lab(tmp_path: Path, reader: MemoryReader, copies: Copies) -> RepositoryLab:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings(()))
    repository = CloudRepository(parse_address("s3://bucket/repo"), PLACE, reader, copies)
    lab.lifecycle.repositories.add(repository)
    return lab


def group(count: int) -> str:
    return CONFIG + f"version_policy: {{ all {{}} }} instance_group [{{ count: {count} }}]"


def test_other_instances_and_versions_neither_end_its_workers_nor_keep_later_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that stays needs one copy; each later one would keep the disk space of files that are gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader, copies = MemoryReader(), Copies()
    reader.objects = {"m/config.pbtxt": group(1), "m/1/x": "x"}

    def folders() -> set[Path]:
        return set(tmp_path.glob("naiad-model-*/m-*/*"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        serving, [keeper] = lab.catalog.resolve("m", "1"), lab.keepers
        [first] = folders()
        for number in range(2, 7):
            reader.objects["m/config.pbtxt"] = group(number)
            reader.objects[f"m/{number}/x"] = str(number)
            reader.objects.pop(f"m/{number - 1}/x" if number > 2 else "", None)
            await lab.lifecycle.polling.once()
            await settled()
            assert lab.catalog.resolve("m", "1") is serving
            assert serving.instances.count == number
            assert not keeper.stopped
        plans = [each.plan for each in lab.keepers if each.plan is not None]
        assert {plan.model_dir for plan in plans if plan.version == 1} == {str(first / "m")}
        await until(lambda: len(folders()) == 2)
        assert first in folders()

    run(new_lab(tmp_path, reader, copies), scenario)
