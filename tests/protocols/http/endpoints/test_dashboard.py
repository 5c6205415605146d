"""The page over HTTP: its files, who gets them, and its event stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kernel.errors import Unavailable
from kernel.options import HttpOptions
from kernel.version import __version__
from protocols.http.dashboard import stream
from protocols.http.dashboard.sampler import HistorySampler
from protocols.http.endpoints import dashboard
from protocols.http.endpoints.dashboard import FILES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from kernel.serving.kernel import Kernel

    Test = Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]
    Exchange = Callable[[Test], None]
    Serve = Callable[[HttpOptions, Test], None]


BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield name and value of each event."""
    while True:
        name = (await response.content.readline()).decode().removeprefix("event: ").strip()
        value = await response.content.readline()
        await response.content.readline()
        if not name:
            return
        yield name, json.loads(value.removeprefix(b"data: "))


async def first_snapshot(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the values of all events up to the first snapshot's last one, by name."""
    found: dict[str, Any] = {}
    async with contextlib.aclosing(events(response)) as each:
        async for name, value in each:
            found[name] = value
            if name == "server":
                break
    return found


def test_a_page_begins_with_what_was_kept_while_none_was_open(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.http.dashboard.sampler.INTERVAL_S", 0.01)

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        (model, *_) = kernel.catalog.ready_models()
        found: dict[str, Any] = {"history": {"server": {"failure_rate": []}}}
        while not any(found["history"]["server"]["failure_rate"]):
            model.statistics.fail.count += 3
            async with session.get(f"/dashboard/events?model={model.spec.name}&version=1") as response:
                found = {"history": {"server": {"failure_rate": []}}} | await first_snapshot(response)
        past = found["history"]
        assert len(past["ages_ms"]) == len(past["server"]["cpu"]) == len(past["model"]["rate"])
        assert past["ages_ms"] == sorted(past["ages_ms"], reverse=True)
        assert max(past["model"]["failure_rate"]) > 0
        assert set(past["model"]["p99_ms"]) == {None}

    exchange(test)


@pytest.mark.parametrize(("method", "accept"), [("GET", "*/*"), ("GET", "application/json"), ("POST", "text/html")])
def test_who_is_no_browser_finds_nothing_at_the_root(exchange: Exchange, method: str, accept: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.request(method, "/", headers={"Accept": accept}) as response:
            assert (response.status, await response.text()) == (404, '{"error":"Not Found. Did you mean GET /v2?"}')

    exchange(test)


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard?x=1"])
def test_the_page_and_all_that_it_loads_come_from_this_server(exchange: Exchange, path: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(path, headers=BROWSER) as response:
            assert (response.status, response.content_type) == (200, "text/html")
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
            text = await response.text()
        loaded = set(re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', text))
        assert len(loaded) == 3
        for name, kind in FILES.items():
            async with session.get(dashboard.FILE_PREFIX + name) as response:
                assert (response.status, response.content_type) == (200, kind), name
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                content = await response.text()
            imported = re.findall(r'from "\./([^"]+)"', content)
            assert set(imported) <= FILES.keys()
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", content), f"{name} names another host"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content), name

    exchange(test)


@pytest.mark.parametrize("name", ["../files.py", "%2e%2e/files.py", "", "index.htm", "main.js/"])
def test_no_other_file_can_be_read(exchange: Exchange, name: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(dashboard.FILE_PREFIX + name) as response:
            assert response.status == 404

    exchange(test)


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard/events", "/dashboard/files/main.js"])
def test_there_is_no_page_without_the_flag_and_no_open_one_with_a_restriction(serve: Serve, path: str) -> None:
    hint = ". Did you mean GET /v2?" if path == "/" else ""

    async def absent(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for method in ("GET", "POST"):
            async with session.request(method, path) as response:
                assert (response.status, await response.json(content_type=None)) == (404, {"error": f"Not Found{hint}"})

    async def restricted(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(path, headers=BROWSER) as response:
            assert response.status == 403
        async with session.get(path, headers={**BROWSER, "X-Key": "a"}) as response:
            assert response.status == 200

    serve(HttpOptions(dashboard=False), absent)
    serve(HttpOptions(restricted_api=("statistics:X-Key=a",)), restricted)


def test_the_stream_has_the_server_its_models_and_what_the_client_may_do(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(dashboard.EVENTS_PATH) as response:
            assert response.content_type == "text/event-stream"
            assert response.headers["Server"] == f"naiad/{__version__}", "not the versions of Python and aiohttp"
            found = await first_snapshot(response)
        assert found["hello"]["viewer"]["permissions"]["infer"] == {"allowed": True}
        rows = {each["row"]["name"]: each for each in found["rows"]}
        assert rows["unloaded"]["reason"] == "unloaded"
        assert rows["echo"]["row"]["state"] == "READY"
        assert found["server"]["server"]["ready_models"] == 8
        assert found["regions"] == []
        assert "detail" not in found

    exchange(test)


def test_the_details_of_a_chosen_model_are_sent(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(dashboard.EVENTS_PATH, params={"model": "repeat", "version": "1"}) as response:
            detail = (await first_snapshot(response))["detail"]
        assert (detail["name"], detail["decoupled"], detail["sequences"]) == ("repeat", True, False)
        assert [each["name"] for each in detail["instances"]] == ["repeat_0"]
        async with session.get(dashboard.EVENTS_PATH, params={"model": "nothing", "version": "x"}) as response:
            assert "detail" not in await first_snapshot(response)

    exchange(test)


def test_streams_are_limited_and_a_place_is_free_again_when_one_ends(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_STREAMS", 2)

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                response = await stack.enter_async_context(session.get(dashboard.EVENTS_PATH))
                await first_snapshot(response)
            async with session.get(dashboard.EVENTS_PATH) as refused:
                assert refused.status == 503
                assert "2 dashboards are open already" in (await refused.json())["error"]
            response.close()
        async with asyncio.timeout(60):
            while True:
                async with session.get(dashboard.EVENTS_PATH) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.01)

    exchange(test)


def test_a_client_that_does_not_read_loses_its_stream(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.0)

    async def unread(self: object, octets: bytes) -> None:
        if octets.startswith(b"event: rows"):
            await asyncio.Event().wait()

    monkeypatch.setattr("aiohttp.web.StreamResponse.write", unread)

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        response = await session.get(dashboard.EVENTS_PATH)
        with pytest.raises(aiohttp.ClientError):
            await response.read()  # the connection is closed within the body
        response.close()

    exchange(test)


def test_a_server_that_stops_ends_its_streams_at_once(
    with_kernel: Callable[[Callable[[Kernel], Awaitable[None]]], None],
) -> None:
    async def test(kernel: Kernel) -> None:
        streams = stream.EventStreams(kernel, HistorySampler(kernel))
        began = asyncio.Event()

        async def look() -> None:
            streams.begin("peer")
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                streams.end()

        looking = asyncio.ensure_future(look())
        await began.wait()
        streams.close()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        assert looking.cancelled()
        assert streams.feed is None
        with pytest.raises(Unavailable, match="Server exiting"):
            streams.begin("peer")

    with_kernel(test)


def test_a_client_with_many_streams_keeps_no_other_client_out(
    with_kernel: Callable[[Callable[[Kernel], Awaitable[None]]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_STREAMS", 4)
    monkeypatch.setattr(stream, "MAX_STREAMS_OF_PEER", 3)

    async def test(kernel: Kernel) -> None:
        streams = stream.EventStreams(kernel, HistorySampler(kernel))

        async def look(peer: str, began: asyncio.Future[None]) -> None:
            try:
                streams.begin(peer)
            except Unavailable as error:
                began.set_exception(error)
                return
            began.set_result(None)
            try:
                await asyncio.Event().wait()
            finally:
                streams.end()

        async def open_stream(peer: str) -> asyncio.Task[None]:
            began = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(look(peer, began))
            await began
            return task

        greedy = [await open_stream("greedy") for _ in range(3)]
        with pytest.raises(Unavailable, match="3 dashboards of this client are open already"):
            await open_stream("greedy")
        await open_stream("first")
        await open_stream("second")
        await asyncio.wait(greedy[:1])
        assert [task.done() for task in greedy] == [True, False, False]
        await open_stream("third")
        with pytest.raises(Unavailable, match="4 dashboards are open already"):
            await open_stream("second")
        streams.close()

    with_kernel(test)
