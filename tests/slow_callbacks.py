"""Fails a test whose event loop was held up: by a callback that computes for over 200 ms, or by one that sleeps.

What counts is the processor time of the callback's thread, less that of garbage collections: how long a callback
computes is a property of the code, however busy the machine is. A step of a coroutine is a callback, also one of the
test itself. `@pytest.mark.slow_loop("why")` allows it, and so does a tracer (coverage, a debugger): it slows all down.

asyncio runs every callback by `Handle._run`. uvloop runs its own in C: there the callbacks that are given to a loop are
measured, and the methods of protocols, which uvloop calls directly. That makes one more Python call of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable  # noqa: TC003 - for the type of a variable
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

#: Work that does not belong on the loop takes seconds. The goal is 5 ms, but a slow machine needs many times that for
#: what is right: `python -m bench heavy` measures, this finds mistakes.
LIMIT_NS = 200_000_000

_PROTOCOL_METHODS = (
    "connection_made", "connection_lost", "data_received", "get_buffer", "buffer_updated", "eof_received",
    "pause_writing", "resume_writing",
)  # fmt: skip

#: Methods of uvloop's loop, and where among their arguments the callback stands. `call_at` calls `call_later`.
_LOOP_METHODS = {
    "call_soon": 0, "call_soon_threadsafe": 0, "call_later": 1, "add_reader": 1, "add_writer": 1,
}  # fmt: skip


class _Thread(threading.local):
    """What goes on in one thread."""

    depth = 0
    collecting_since_ns = 0
    collected_ns = 0


_thread = _Thread()

#: What held a loop up, and nobody has looked at yet.
_found: list[str] = []
_report: Callable[[str], None] = _found.append


def _run(name: Callable[[], object], function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Call `function` and measure that, unless this is within another measured call. `name` says what it is."""
    if _thread.depth:
        return function(*arguments, **keywords)
    _thread.depth, _thread.collected_ns = 1, 0
    begin_ns = time.thread_time_ns()
    try:
        return function(*arguments, **keywords)
    finally:
        took_ns = time.thread_time_ns() - begin_ns - _thread.collected_ns
        _thread.depth = 0
        if took_ns > LIMIT_NS:
            _report(f"{name()} computed for {took_ns / 1e6:.0f} ms")


def _note_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _thread.collecting_since_ns = time.thread_time_ns()
    else:
        _thread.collected_ns += time.thread_time_ns() - _thread.collecting_since_ns


def _sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    if _thread.depth:
        _report(f"a callback slept for {seconds * 1000:g} ms")
    sleep(seconds)


def _watch_asyncio() -> None:
    run = asyncio.Handle._run

    def measured(self: asyncio.Handle) -> None:
        _run(functools.partial(_described, self._callback), run, (self,), {})  # type: ignore[attr-defined]

    asyncio.Handle._run = measured  # type: ignore[method-assign]


def _watch_uvloop() -> None:
    for method, place in _LOOP_METHODS.items():
        setattr(uvloop.Loop, method, _with_measured_callback(getattr(uvloop.Loop, method), place))
    asyncio.BaseProtocol.__init_subclass__ = classmethod(_measure_protocol)  # type: ignore[assignment,arg-type]


def _with_measured_callback(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: object, *arguments: Any, **keywords: Any) -> Any:
        callback = arguments[place]

        def measured(*given: Any) -> Any:
            return _run(functools.partial(_described, callback), callback, given, {})

        return method(self, *arguments[:place], measured, *arguments[place + 1 :], **keywords)

    return call


def _measure_protocol(cls: type, **keywords: object) -> None:
    for method in _PROTOCOL_METHODS:
        if (function := cls.__dict__.get(method)) is not None:
            setattr(cls, method, _measured_method(function))


def _measured_method(function: Callable[..., Any]) -> Callable[..., Any]:
    name = functools.partial(_qualified, function)

    @functools.wraps(function)
    def measured(*arguments: Any, **keywords: Any) -> Any:
        return _run(name, function, arguments, keywords)

    return measured


def _described(callback: object) -> str:
    """Return the task whose step `callback` is, or what it is itself."""
    owner = getattr(callback, "__self__", None)
    return repr(owner if isinstance(owner, asyncio.Task) else callback)


def _qualified(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Give what is found while the block runs to the block alone."""
    before = _found[:]
    _found.clear()
    mine: list[str] = []
    try:
        yield mine
    finally:
        mine += _found
        _found[:] = before


def watch(report: Callable[[str], None] | None = None) -> None:
    """Measure from now on. Protocols that were defined before are not measured on uvloop.

    What is found goes to `report`, if there is one, and does not fail a test of this process.
    """
    global _report
    _report = report or _report
    _watch_asyncio()
    _watch_uvloop()
    gc.callbacks.append(_note_collection)
    time.sleep = _sleep  # type: ignore[assignment]


def _check(item: pytest.Item) -> None:
    found = _found[:]
    _found.clear()
    if found and sys.gettrace() is None and item.get_closest_marker("slow_loop") is None:
        pytest.fail("the event loop was held up:\n" + "\n".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    _check(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    _check(item)
