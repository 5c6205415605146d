"""Closed-loop clients of both protocols in a thread: each sends, waits for the response, and sends again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Any

from tests.faults.client import SERVICE, TIMEOUT_S, Client, expect_success, number_body, number_message, returned_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from bench.server import ServerProcess
    from tests.faults.ledger import Ledger


class Load:
    """Runs while a `with` block runs. The clients send numbers to the model `obey`, or to another one that takes them.

    `ledger` has what became of each request, `answered` the numbers that came back, `finished_at` when each response
    or error came (`time.monotonic`).
    """

    def __init__(self, server: ServerProcess, *, http: int = 16, grpc: int = 16, model: str = "obey") -> None:
        self._counts = (http, grpc)
        self._model = model
        self._client = Client(server.url, server.grpc_url, Random(1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.answered: set[int] = set()
        self.finished_at: list[tuple[float, bool]] = []

    @property
    def ledger(self) -> Ledger:
        return self._client.ledger

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        self._client.open()
        http, grpc = self._counts
        kinds = [self._http] * http + [self._grpc] * grpc
        await asyncio.gather(*(self._repeat(kind) for kind in kinds))
        await self._client.close()

    async def _repeat(self, kind: Callable[[int], Awaitable[None]]) -> None:
        while not self._stop.is_set():
            number = self._client.next_id()
            before = len(self.answered)
            await kind(number)
            answered = number in self.answered
            self.finished_at.append((time.monotonic(), answered))
            if not answered and before == len(self.answered):
                await asyncio.sleep(0.01)  # a server that refuses everything is not asked as fast as it can

    async def _http(self, number: int) -> None:
        async with self._client.counted("HTTP"):
            found: Any = expect_success(
                *await self._client.post(f"/v2/models/{self._model}/infer", number_body(number))
            )
            assert found["outputs"][0]["data"] == [number], "another request's response"
            self.answered.add(number)

    async def _grpc(self, number: int) -> None:
        async with self._client.counted("gRPC"):
            call = self._client.grpc.unary_unary(f"{SERVICE}ModelInfer")
            response = await call(number_message(self._model, number), timeout=TIMEOUT_S)
            assert returned_number(response) == number, "another request's response"
            self.answered.add(number)

    def wait_for_answers(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until so many more requests have succeeded. Raises `TimeoutError`."""
        goal, deadline = len(self.answered) + count, time.monotonic() + timeout_s
        while len(self.answered) < goal:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.answered)} requests have succeeded, not {goal}")
            time.sleep(0.002)

    def first_error_after(self, moment: float) -> float | None:
        """Return when the first request failed after a moment; None if none did."""
        with contextlib.suppress(StopIteration):
            return next(at for at, ok in self.finished_at if at >= moment and not ok)
        return None
