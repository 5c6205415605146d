"""Tasks of helpers whose result is a message."""

from __future__ import annotations

import pytest

from kernel.errors import InternalError, ServingError, Unavailable
from kernel.serving.helper_tasks import MessageTask
from shm.arena import Arena
from shm.tensor import Tensor


def source(arena: Arena) -> Tensor:
    block = arena.take(8192)
    assert block is not None
    return Tensor("a", "UINT8", [8192], None, block.span)


@pytest.mark.parametrize("failed", [False, True])
def test_the_sources_are_released_and_the_owner_gets_the_result_or_the_error(failed: bool) -> None:
    ended: list[bytes | ServingError] = []
    error = Unavailable("lost")
    with Arena("a", 1 << 20) as arena:
        task = MessageTask("t", b"a", [source(arena)], ended=ended.append)
        assert arena.allocator.used_bytes
        if failed:
            task.failed(error)
        else:
            task.done(b"r", source(arena))
        assert not arena.allocator.used_bytes
    assert ended == [error if failed else b"r"]


def test_memory_for_a_result_is_refused() -> None:
    with pytest.raises(InternalError, match="task t needs no memory of the server"):
        MessageTask("t").needs_memory(b"")
