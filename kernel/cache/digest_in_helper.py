"""Has a helper hash the inputs of a request, because it takes too long for the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.cache.digest_task import DIGEST
from kernel.errors import InternalError, ServingError
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import Helpers
    from shm.tensor import Span


class DigestTask:
    """The task. A `kernel.serving.helper_tasks.HelperTask`."""

    name = DIGEST

    def __init__(self, description: bytes, inputs: Sequence[Tensor], peer: str) -> None:
        """Takes leases of its own. `peer` is the client that waits."""
        self.peer = peer
        self.arguments = description
        self.sources = [
            Tensor("", "UINT8", [each.byte_size], each.data, each.span and each.span.shared()) for each in inputs
        ]
        self._key: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def run(self, helpers: Helpers) -> bytes:
        """Return the key. Raises `ServingError`."""
        helpers.start(self)
        try:
            return await self._key
        except asyncio.CancelledError:
            helpers.cancel(self)
            raise

    def needs_memory(self, message: bytes) -> Span:
        """Refuse: the result is small."""
        raise InternalError("hashing needs no memory of the server")

    def done(self, result: bytes, output: Tensor | None) -> None:
        """See `HelperTask`."""
        self._release()
        if output is not None:
            output.release()
        if not self._key.done():
            self._key.set_result(result)

    def failed(self, error: ServingError) -> None:
        """See `HelperTask`."""
        self._release()
        if not self._key.done():
            self._key.set_exception(error)

    def _release(self) -> None:
        for source in self.sources:
            source.release()
