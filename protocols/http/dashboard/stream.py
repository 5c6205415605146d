"""The event stream of the page: what has changed since the last event, once a second (text/event-stream).

There are few streams at a time, and no client can keep others out: where all are in use, the client with the most
loses its oldest one to a client that has fewer. A client that reads slowly gets fewer events, each with all that has
changed since the one before; one that reads nothing for a time loses its connection. So nothing queues.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import Unavailable
from kernel.observe.recent import SERVER
from protocols.http import web
from protocols.http.dashboard.feed import Feed, rows_for
from protocols.http.dashboard.figures import recent_part, traffic_of
from protocols.http.dashboard.viewer import find_viewer
from protocols.http.responses import SERVER_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.observe.recent import RecentLine
    from kernel.serving.interface import KernelInterface
    from protocols.http.call import HttpCall
    from protocols.http.dashboard.feed import Key, Snapshot
    from protocols.http.dashboard.history import History
    from protocols.http.dashboard.sampler import HistorySampler
    from protocols.http.dashboard.viewer import Viewer

#: How many streams there may be, for all clients together, and for one.
MAX_STREAMS = 32
MAX_STREAMS_OF_PEER = 8

#: How long a client may read nothing before its stream ends, in seconds.
SEND_TIMEOUT_S = 20.0

#: How many rows are joined into one event: the event loop is not kept from others by a page of thousands of models.
ROWS_PER_EVENT = 2000

_encode = msgspec.json.Encoder().encode


class EventStreams:
    """All streams of a server, and the feed that they share while there are any."""

    def __init__(self, kernel: KernelInterface, sampler: HistorySampler) -> None:
        self._kernel = kernel
        self.sampler = sampler
        #: None while there is no stream.
        self.feed: Feed | None = None
        #: The client of each stream, the oldest stream first.
        self._peers: dict[asyncio.Task[None], str] = {}
        self._closed = False

    def begin(self, peer: str) -> Feed:
        """Return the feed for one more stream of the client `peer`. Raises `Unavailable` if there are too many."""
        if self._closed:
            raise Unavailable("Server exiting")
        counts = Counter(self._peers.values())
        if counts[peer] >= MAX_STREAMS_OF_PEER:
            raise Unavailable(f"{MAX_STREAMS_OF_PEER} dashboards of this client are open already: close one")
        if len(self._peers) >= MAX_STREAMS:
            largest, count = counts.most_common(1)[0]
            if count < counts[peer] + 2:
                raise Unavailable(f"{MAX_STREAMS} dashboards are open already: close one")
            oldest = next(task for task, owner in self._peers.items() if owner == largest)
            del self._peers[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None, "a stream is sent by a task"
        self._peers[task] = peer
        if self.feed is None:
            self.feed = Feed(self._kernel)
        return self.feed

    def end(self) -> None:
        """The stream of this task has ended."""
        task = asyncio.current_task()
        assert task is not None, "a stream is sent by a task"
        self._peers.pop(task, None)
        if not self._peers:
            self.feed = None

    def close(self) -> None:
        """End all streams, and allow no others: the server stops."""
        self._closed = True
        for task in self._peers:
            task.cancel()


class Greeting(msgspec.Struct, frozen=True):
    """The first event: what does not change while the stream lasts."""

    server: str
    version: str
    viewer: Viewer


class EventWriter:
    """Makes the events of one stream. Remembers what its client has."""

    def __init__(self, kernel: KernelInterface, feed: Feed, viewer: Viewer, chosen: Key | None) -> None:
        """`chosen` is the model version whose details the client wants to see."""
        self._kernel = kernel
        self._feed = feed
        self._viewer = viewer
        self._chosen = chosen
        self.seen = 0
        self._recent_change = -1
        #: What the client has of the traffic of the model.
        self._traffic = b"null"
        self._last_line = 0

    def hello(self) -> bytes:
        """Return the first event."""
        identity = self._kernel.identity
        return _event("hello", _encode(Greeting(identity.name, identity.version, self._viewer)))

    def past(self, history: History | None) -> Iterable[bytes]:
        """Yield the event with the last two minutes, if something is known of them."""
        if history is not None:
            yield _event("history", _encode(history.shown(time.monotonic_ns(), self._chosen)))

    def events(self, snapshot: Snapshot) -> Iterable[bytes]:
        """Yield the events about `snapshot`; it does not change meanwhile if its number does not."""
        seen, viewer = self.seen, self._viewer
        rows = list(rows_for(snapshot, seen, all_states=viewer.may("index")))
        for begin in range(0, len(rows), ROWS_PER_EVENT):
            yield _event("rows", b"[%b]" % b",".join(rows[begin : begin + ROWS_PER_EVENT]))
        if gone := [key for key, number in snapshot.gone.items() if number > seen]:
            yield _event("gone", _encode(gone))
        if viewer.may("regions") and (snapshot.regions_changed > seen or not seen):
            yield _event("regions", snapshot.regions)
        yield from self._chosen_events()
        self.seen = snapshot.number
        yield _event("server", b'{"number":%d,"server":%b}' % (snapshot.number, snapshot.server))

    def _chosen_events(self) -> Iterable[bytes]:
        model_name = SERVER if self._chosen is None else self._chosen[0]
        recent = self._kernel.settings.recent
        if self._chosen is not None:
            detail = self._feed.detail(self._chosen)
            if detail is not None:
                yield _event("detail", _encode(detail))
            if self._viewer.may("traffic"):
                traffic = _encode(traffic_of(self._kernel, model_name))
                if traffic != self._traffic:
                    self._traffic = traffic
                    yield _event("traffic", traffic)
            requests = recent.requests.of(model_name) if recent is not None else None
            if requests is not None and requests.change != self._recent_change:
                self._recent_change = requests.change
                yield _event("recent", _encode(recent_part(requests, self._feed.snapshot.now_ns)))
        if recent is not None and recent.lines is not None and self._viewer.may("log"):
            lines: list[RecentLine] = recent.lines.since(model_name, self._last_line)
            if lines:
                self._last_line = lines[-1].number
                yield _event("lines", _encode(lines))


async def send_events(call: HttpCall, streams: EventStreams, peer: object) -> web.StreamResponse:
    """Send events until the client goes away, reads nothing, or the server stops."""
    kernel, query = call.kernel, call.http.query
    chosen = (query["model"], query.get("version", "")) if query.get("model") else None
    feed = streams.begin(call.peer)
    if chosen is not None:
        feed.chosen[chosen] = feed.chosen.get(chosen, 0) + 1
    try:
        viewer = find_viewer(
            call.door.rules,
            call.http.headers.get,
            peer,
            explicit_control=kernel.settings.explicit_control,
            owned_regions=kernel.regions.owned,
        )
        response = web.StreamResponse(headers={**SERVER_HEADER, **EVENT_HEADERS, **call.response_headers})
        await response.prepare(call.http)
        writer = EventWriter(kernel, feed, viewer, chosen)
        await _send(response, [writer.hello(), *writer.past(streams.sampler.history)])
        while not kernel.stopping:
            snapshot = await feed.next(writer.seen)
            await _send(response, list(writer.events(snapshot)))
    finally:
        if chosen is not None:
            feed.chosen[chosen] -= 1
            if not feed.chosen[chosen]:
                del feed.chosen[chosen]
        streams.end()
    return response


EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}


async def _send(response: web.StreamResponse, events: Iterable[bytes]) -> None:
    """Write events. Raises `ConnectionResetError` if the client reads nothing of them for a time."""
    deadline_s = time.monotonic() + SEND_TIMEOUT_S
    try:
        for event in events:
            async with asyncio.timeout(max(deadline_s - time.monotonic(), 0.001)):
                await response.write(event)
    except TimeoutError:
        raise ConnectionResetError("the client does not read the events of the dashboard") from None


def _event(name: str, text: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text)
