"""Answers on their way to the kernel: exactly one final one per request, whoever sends it.

The final answers of a batch are kept back until the backend is done and then leave in one message.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backends import wire
from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.mailbox import Mailbox
    from backends.worker.outputs import OutputWriter
    from backends.worker.request import OutputValue, WorkerRequest
    from shm.arrays import Array


class Answers:
    """The `Responder` of a worker's requests. Callable from any thread."""

    def __init__(
        self, outputs: OutputWriter, send: Callable[[wire.ToKernel], None], mailbox: Callable[[], Mailbox]
    ) -> None:
        self._outputs = outputs
        self._send = send
        self._mailbox = mailbox
        self._lock = threading.RLock()
        self._live: dict[int, WorkerRequest] = {}
        #: The highest number of a request whose batch was opened: numbers grow.
        self._newest = 0
        self._cancelled: set[int] = set()
        #: Responses that the kernel may still be sent, of requests with more than one.
        self._credit: dict[int, int] = {}
        #: Final answers of the batch that is being executed, by request number.
        self._batch: dict[int, wire.ResponseRef | None] = {}

    # ---- for the worker loop -----------------------------------------------------------------

    def open_batch(self, requests: Sequence[WorkerRequest]) -> None:
        """The requests are about to be executed."""
        with self._lock:
            for request in requests:
                number = request.ref.number
                if number > self._newest:
                    self._newest = number
                self._live[number] = request
                self._batch[number] = None

    def close_batch(self, numbers: Sequence[int]) -> list[wire.ResponseRef]:
        """The backend is done. Returns the final answers in order if there is one for every request;
        otherwise those that there are have been sent, and others come later."""
        with self._lock:
            finals = [self._batch.pop(number) for number in numbers]
            if None not in finals:
                return finals  # type: ignore[return-value]  # as was just asked
            for number, final in zip(numbers, finals, strict=True):
                if final is not None:
                    self._send(wire.Responded(number, True, final))
            return []

    def cancel(self, numbers: Sequence[int]) -> None:
        """The clients of these requests are gone, of which some may still wait for their batch."""
        self._cancelled.update(number for number in numbers if number in self._live or number > self._newest)

    def was_cancelled(self, request: WorkerRequest) -> bool:
        """Whether the request was cancelled before it was executed."""
        return request.ref.number in self._cancelled

    def grant(self, number: int, count: int) -> None:
        if number in self._live:
            self._credit[number] = self._credit.get(number, wire.CREDIT_WINDOW) + count

    def unanswered(self, requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        return [request for request in requests if not request.finished]

    # ---- the Responder protocol --------------------------------------------------------------

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        return self._outputs.reserve(request, name, datatype, shape)

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        refs: list[wire.TensorRef] = []
        try:
            for output in outputs:
                ref = self._outputs.write(request, output)
                if ref is not None:
                    refs.append(ref)
        except ServingError as error:
            self._outputs.free_refs(refs)
            self.fail(request, error, final)
            return
        self._answer(request, wire.ResponseRef(refs, dict(parameters)), final)

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        self._answer(request, wire.ResponseRef(error_code=error.code.value, error_text=error.message), final)

    def finish(self, request: WorkerRequest) -> None:
        self._answer(request, None, True)

    def is_cancelled(self, request: WorkerRequest) -> bool:
        self._mailbox().poll()
        return request.ref.number in self._cancelled

    # ---- sending -----------------------------------------------------------------------------

    def _answer(self, request: WorkerRequest, response: wire.ResponseRef | None, final: bool) -> None:
        number = request.ref.number
        if not final:
            self._wait_for_credit(number)
        with self._lock:
            if request.finished:
                raise InternalError("a response was sent after the final one")
            if response is not None:
                request.response_count += 1
            if final:
                self._end(request)
            keep = final and response is not None and request.response_count == 1 and number in self._batch
            if keep:
                self._batch[number] = response
            else:
                self._send(wire.Responded(number, final, response))

    def _end(self, request: WorkerRequest) -> None:
        number = request.ref.number
        request.finished = True
        if request.reserved:
            self._outputs.free_reserved(request)
        self._live.pop(number, None)
        self._cancelled.discard(number)
        if self._credit:
            self._credit.pop(number, None)

    def _wait_for_credit(self, number: int) -> None:
        """Wait while the client is too far behind; a request whose client has gone never waits."""
        credit = self._credit
        if credit.setdefault(number, wire.CREDIT_WINDOW) <= 0:
            self._mailbox().wait_until(lambda: credit.get(number, 1) > 0 or number in self._cancelled)
        with self._lock:
            if number in credit:
                credit[number] -= 1
