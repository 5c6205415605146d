"""Tasks of helpers for coroutines, which wait for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import InternalError, RequestCancelled, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.front_doors.interface import KernelInterface
    from shm.arena import Block
    from shm.tensor import Span, Tensor


class AwaitedTask:
    """Runs a task whose result a coroutine waits for. A `kernel.serving.helper_tasks.HelperTask`.

    It releases the leases of its sources, and of the memory for its result, when it has ended.
    """

    def __init__(
        self,
        kernel: KernelInterface,
        name: str,
        arguments: bytes,
        sources: list[Tensor],
        take_memory: Callable[[bytes], Block] | None = None,
        peer: str = "",
    ) -> None:
        """`take_memory` returns memory for the result, for what the function has found out; it is `memory` then."""
        self.name = name
        self.arguments = arguments
        self.sources = sources
        self.peer = peer
        self.memory: Block | None = None
        self._kernel = kernel
        self._take_memory = take_memory
        self._result: asyncio.Future[tuple[bytes, Tensor | None]] = asyncio.get_running_loop().create_future()

    async def run(self) -> tuple[bytes, Tensor | None]:
        """Return the message and the output of the function. The caller releases the output, and `memory`.

        Raises `ServingError`.
        """
        self._kernel.helpers.add(self)
        try:
            return await self._result
        except asyncio.CancelledError:
            self._kernel.helpers.cancel(self)
            if not self._result.cancelled():  # it has come, and the caller does not get it
                self._forget()
            raise

    # ---- kernel.serving.helper_tasks.HelperTask --------------------------------------------------

    def needs_memory(self, message: bytes) -> Span:
        """Return the memory for the result."""
        if self._result.done():
            raise RequestCancelled
        if self._take_memory is None:
            raise InternalError(f"task {self.name} needs no memory of the server")
        self.memory = self._take_memory(message)
        return self.memory.span

    def done(self, result: bytes, output: Tensor | None) -> None:
        """Let `run` return."""
        self._release_sources()
        if self._result.done():  # cancelled
            self._release_memory()
            if output is not None:
                output.release()
        else:
            self._result.set_result((result, output))

    def failed(self, error: ServingError) -> None:
        """Let `run` raise."""
        self._release_sources()
        self._release_memory()
        if not self._result.done():
            self._result.set_exception(error)

    def _forget(self) -> None:
        """Release the result that nobody gets."""
        self._release_memory()
        if self._result.exception() is None:
            output = self._result.result()[1]
            if output is not None:
                output.release()

    def _release_sources(self) -> None:
        for source in self.sources:
            source.release()

    def _release_memory(self) -> None:
        if self.memory is not None:
            self.memory.release()
            self.memory = None
