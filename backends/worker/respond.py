"""Answers on their way to the kernel: exactly one final one per request, whoever sends it.

The final answers of a batch are kept back until the backend is done and then leave in one message.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backends.transport import wire
from backends.worker.request import WorkerRequest
from kernel.errors import InternalError, RequestCancelled, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.held import HeldInputs
    from backends.worker.mailbox import Mailbox
    from backends.worker.outputs import OutputWriter
    from backends.worker.request import OutputValue
    from shm.arrays import Array


class BatchResponder:
    """The `Responder` of a worker's requests. Callable from any thread."""

    def __init__(
        self,
        outputs: OutputWriter,
        held: HeldInputs,
        send: Callable[[wire.ToKernel], None],
        mailbox: Callable[[], Mailbox],
    ) -> None:
        self._outputs = outputs
        self._held = held
        self._send = send
        self._mailbox = mailbox
        self._lock = threading.RLock()
        #: Requests without a final answer, by their numbers. To look at only.
        self.live: dict[int, WorkerRequest] = {}
        #: The highest number of a request whose batch was opened: numbers grow.
        self._newest = 0
        self._cancelled: set[int] = set()
        #: Responses that the kernel may still be sent, of requests with more than one.
        self._credit: dict[int, int] = {}
        #: Final answers of the batch that is being executed, by request number, in its order.
        self._batch: dict[int, wire.ResponseMessage | None] = {}

    # ---- for the worker loop -----------------------------------------------------------------

    def open_batch(self, refs: Sequence[wire.RequestMessage]) -> list[WorkerRequest]:
        """Return the requests that are to be executed now: those whose clients have gone are answered."""
        # Without the lock: no other thread answers any of these before this returns.
        requests: list[WorkerRequest] = []
        batch: dict[int, wire.ResponseMessage | None] = {}
        for ref in refs:
            number = ref.number
            request = WorkerRequest(ref, [], self)
            requests.append(request)
            batch[number] = None
            self.live[number] = request  # before it stops being newer: `cancel` asks for either
            if number > self._newest:
                self._newest = number
        self._batch = batch
        return self._without_cancelled(requests) if self._cancelled else requests

    def _without_cancelled(self, requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        wanted: list[WorkerRequest] = []
        for request in requests:
            if request.ref.number in self._cancelled:
                request.fail(RequestCancelled())
            else:
                wanted.append(request)
        return wanted

    def close_batch(self) -> list[wire.ResponseMessage]:
        """The backend is done, and nothing of ours leads to the inputs of the batch.

        Returns the final answers in order if there is one for every request; otherwise those that there are
        have been sent, and others come later.
        """
        finals = list(self._batch.values())
        if None not in finals and not self._held.watched:  # the usual case: no thread has anything to add
            self._batch = {}
            return finals  # type: ignore[return-value]  # as was just asked
        with self._lock:  # what other threads answer from here on does not belong to the batch
            self._note_held()
            batch, self._batch = self._batch, {}
            finals = list(batch.values())
            if None not in finals:
                return finals  # type: ignore[return-value]  # as was just asked
            for number, final in batch.items():
                if final is not None:
                    self._send(wire.Responded(number, True, final))
            return []

    def _note_held(self) -> None:
        """Tell which inputs of the batch the model keeps. It may change them before the kernel has sent them."""
        for number in self._held.ended([number for number in self._batch if number not in self.live]):
            final = self._batch[number]
            if final is not None:
                try:
                    final.outputs = self._outputs.copied(final.outputs)
                except ServingError as error:
                    self._batch[number] = _failure(error)

    def cancel(self, numbers: Sequence[int]) -> None:
        """The clients of these requests are gone, of which some may still wait for their batch."""
        self._cancelled.update(number for number in numbers if number in self.live or number > self._newest)

    def grant(self, number: int, count: int) -> None:
        if number in self.live:
            self._credit[number] = self._credit.get(number, wire.CREDIT_WINDOW) + count

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
        try:
            refs = self._outputs.write(request, outputs, pass_on=final and request.ref.number in self._batch)
        except ServingError as error:
            self.fail(request, error, final)
            return
        self._answer(request, wire.ResponseMessage(refs, dict(parameters) if parameters else {}), final)

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        self._answer(request, _failure(error), final)

    def finish(self, request: WorkerRequest) -> None:
        self._answer(request, None, True)

    def is_cancelled(self, request: WorkerRequest) -> bool:
        self._mailbox().poll()
        return request.ref.number in self._cancelled

    # ---- sending -----------------------------------------------------------------------------

    def _answer(self, request: WorkerRequest, response: wire.ResponseMessage | None, final: bool) -> None:
        number = request.ref.number
        if not final:
            self._wait_for_credit(number)
        with self._lock:
            if request.finished:
                raise InternalError("a response was sent after the final one")
            if response is not None:
                request.response_count += 1
            if final:
                request.finished = True
                if request.reserved:
                    self._outputs.free_reserved(request)
                self.live.pop(number, None)
                if self._cancelled:
                    self._cancelled.discard(number)
                if self._credit:
                    self._credit.pop(number, None)
            keep = final and response is not None and request.response_count == 1 and number in self._batch
            if keep:
                self._batch[number] = response
            else:
                if final and self._held.watched:
                    self._held.ended([number], backend_returned=False)
                self._send(wire.Responded(number, final, response))

    def _wait_for_credit(self, number: int) -> None:
        """Wait while the client is too far behind; a request whose client has gone never waits."""
        credit = self._credit
        if credit.setdefault(number, wire.CREDIT_WINDOW) <= 0:
            self._mailbox().wait_until(lambda: credit.get(number, 1) > 0 or number in self._cancelled)
        with self._lock:
            if number in credit:
                credit[number] -= 1


def _failure(error: ServingError) -> wire.ResponseMessage:
    return wire.ResponseMessage(
        error_code=error.code.value, error_text=error.message, error_before_queueing=error.before_queueing
    )
