"""`is_ready` of a model: whether it is healthy, as it says itself (Triton since 2026-03)."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from backends.python.failures import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from backends.python.event_loop import EventLoop


def check_health(model: Any, instance_name: str, loop: Callable[[], EventLoop], done: Callable[[str], None]) -> None:
    """Call the model's `is_ready`, and `done` with the reason why it is not ready, or with an empty text.

    An `async def is_ready` runs on `loop()`; then `done` is called from there.
    """
    try:
        returned = model.is_ready()
    except BaseException as error:
        done(_failed(instance_name, error))
        return
    if isinstance(returned, types.CoroutineType):
        loop().start_task(_await(returned, instance_name, done))
    else:
        done(_problem(instance_name, returned))


async def _await(coroutine: Coroutine[Any, Any, object], instance_name: str, done: Callable[[str], None]) -> None:
    try:
        problem = _problem(instance_name, await coroutine)
    except BaseException as error:  # also a task of the model that was cancelled
        problem = _failed(instance_name, error)
    done(problem)


def _problem(instance_name: str, returned: object) -> str:
    if not isinstance(returned, bool):
        return f"Model '{instance_name}' is not ready: is_ready() must return a boolean value, found {type(returned)}."
    return "" if returned else f"Model '{instance_name}' is not ready (user-defined check failed)."


def _failed(instance_name: str, error: BaseException) -> str:
    return f"Model '{instance_name}' is not ready: is_ready() failed: {describe(error)}"
