"""Has a helper hash the inputs of a request, because it takes too long for the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.cache.digest_task import DIGEST
from kernel.serving.helper_tasks import MessageTask
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.errors import ServingError
    from kernel.serving.helper_tasks import Helpers


async def digest_in_helper(helpers: Helpers, description: bytes, inputs: Sequence[Tensor], peer: str) -> bytes:
    """Return the key of a request with these inputs, of which leases of its own are taken. Raises `ServingError`.

    `peer` is the client that waits.
    """
    key: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def ended(result: bytes | ServingError) -> None:
        if key.done():  # cancelled
            return
        if isinstance(result, bytes):
            key.set_result(result)
        else:
            key.set_exception(result)

    sources = [Tensor("", "UINT8", [each.byte_size], each.data, each.span and each.span.shared()) for each in inputs]
    task = MessageTask(DIGEST, description, sources, peer=peer, ended=ended)
    helpers.add(task)
    try:
        return await key
    except asyncio.CancelledError:
        helpers.cancel(task)
        raise
