from __future__ import annotations

import asyncio

import pytest

from backends.python.event_loop import EventLoop


async def current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_all_coroutines_run_on_one_loop() -> None:
    loop = EventLoop()
    loop.start()
    first, second = (loop.submit(current_loop()).result(20) for _ in range(2))
    assert first is second
    loop.stop()
    assert first.is_closed()


def test_stop_cancels_running_coroutines() -> None:
    loop = EventLoop()
    loop.start()
    waiting = loop.submit(asyncio.Event().wait())
    loop.stop()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(unstarted := current_loop())
    unstarted.close()
