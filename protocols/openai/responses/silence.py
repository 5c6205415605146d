"""One timer for all streams of a server: clients and proxies give up connections on which nothing comes for long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocols.openai.generation import Generation

#: How often streams are looked at, in seconds.
TICK_S = 1

#: After this time without a response the head of a stream is sent: its status can no longer be that of an error.
HEAD_AFTER_S = 1

#: After this time without a chunk a stream gets a comment.
COMMENT_AFTER_S = 15


class SilenceWatch:
    """Wakes streams that wait for a model for long. The timer runs while there are streams."""

    def __init__(self) -> None:
        #: Stream → the seconds after which it is woken.
        self._streams: dict[Generation, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def add(self, stream: Generation) -> None:
        """Wake `stream` when it should begin. The caller removes it."""
        self._streams[stream] = HEAD_AFTER_S
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def begun(self, stream: Generation) -> None:
        """The head of `stream` was sent: wake it when a comment is due."""
        self._streams[stream] = COMMENT_AFTER_S

    def remove(self, stream: Generation) -> None:
        self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._streams else None

    def look(self) -> None:
        """A second has passed: wake the streams that have been silent for too long."""
        for stream, limit_s in self._streams.items():
            if not stream.waits:
                continue
            stream.silent_s += TICK_S
            if stream.silent_s >= limit_s:
                stream.silent_s = 0
                stream.wake()
