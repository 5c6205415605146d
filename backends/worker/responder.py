"""Sends responses to the kernel: exactly one final response for each request, from any thread.

The final responses of a batch are collected until the backend returns, and then sent in one message. Those that a
coroutine sends fast, one after the other, leave together at its next `await`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.transport.texts import shortened
from backends.worker.reports import ReportCollector, send_outputs
from backends.worker.request import WorkerRequest
from kernel.errors import InternalError, RequestCancelled, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.worker.held_inputs import HeldInputs
    from backends.worker.message_reader import KernelMessageReader
    from backends.worker.outputs import OutputWriter
    from backends.worker.request import OutputValue
    from shm.arrays import Array


#: How many responses without credit a thread with an event loop may send before it has to wait, for each request.
MAX_OVERSHOOT = 16 * wire.CREDIT_WINDOW

#: A response of a coroutine waits for others if it comes this soon after the last one, in nanoseconds.
FAST_NS = 100_000

#: How long the oldest one of them may wait, in nanoseconds.
MAX_KEPT_NS = 300_000


class BatchResponder:
    """The `Responder` of a worker's requests. Callable from any thread."""

    def __init__(
        self,
        outputs: OutputWriter,
        held: HeldInputs,
        send: Callable[[wire.ToKernel], None],
        reader: Callable[[], KernelMessageReader],
        reports: ReportCollector | None = None,
        send_later: Callable[[wire.ToKernel], None] | None = None,
        flush: Callable[[], None] | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`send_later` lets a message wait for the next one or for `flush`; without it nothing waits."""
        #: What backends report about the requests.
        self.reports = reports or ReportCollector(send, lambda level, text: None)
        #: Called before a response is sent that is not sent with its batch.
        self.before_response: Callable[[], None] = _nothing
        self._outputs = outputs
        self._held = held
        self._send = send
        self._reader = reader
        self._lock = threading.RLock()
        #: Whether a request has one response: the model is not decoupled.
        self.single_response = False
        #: Requests without a final response, by their numbers. Read-only for other objects.
        self.live: dict[int, WorkerRequest] = {}
        #: The highest request number of any opened batch. Numbers only increase.
        self._newest = 0
        self._cancelled: set[int] = set()
        #: How many more responses may be sent now, by request number; only for requests with several responses.
        self._credit: dict[int, int] = {}
        #: What is called when a request has credit again, or its client has disconnected.
        self._credit_waiters: dict[int, Callable[[], object]] = {}
        self._main_thread = threading.get_ident()
        self._send_later = send_later or send
        self._flush = flush or _nothing
        self._now_ns = now_ns
        #: When a coroutine has last sent a response, and since when a response waits; 0 while none waits.
        self._last_ns = self._kept_since_ns = 0
        #: Final responses of the current batch, by request number, in the order of the batch.
        self._batch: dict[int, wire.ResponseMessage | None] = {}

    # ---- for the worker loop -----------------------------------------------------------------

    def open_batch(self, refs: Sequence[wire.RequestMessage]) -> list[WorkerRequest]:
        """Return the requests to execute. Requests whose clients have disconnected are failed instead."""
        # Without the lock: no other thread responds to these requests before this returns.
        requests: list[WorkerRequest] = []
        batch: dict[int, wire.ResponseMessage | None] = {}
        for ref in refs:
            number = ref.number
            request = WorkerRequest(ref, [], self)
            requests.append(request)
            batch[number] = None
            self.live[number] = request  # before `_newest` is set: `cancel` checks both
            if number > self._newest:
                self._newest = number
        self._batch = batch
        return self.without_cancelled(requests) if self._cancelled else requests

    def any_cancelled(self, numbers: Iterable[int]) -> bool:
        """Whether the client of one of these requests has disconnected."""
        cancelled = self._cancelled
        return bool(cancelled) and any(number in cancelled for number in numbers)

    def without_cancelled(self, requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        """Return the requests whose clients have not disconnected. The others are failed."""
        wanted: list[WorkerRequest] = []
        for request in requests:
            if request.ref.number in self._cancelled:
                request.fail(RequestCancelled())
            else:
                wanted.append(request)
        return wanted

    def close_batch(self) -> list[wire.ResponseMessage]:
        """End the batch: the backend has returned, and our code has no reference to the batch's inputs.

        Returns the final responses in order if each request has one. Otherwise sends the existing ones and returns an
        empty list; the others are sent later.
        """
        finals = list(self._batch.values())
        if None not in finals and not self._held.watched:  # the usual case: no other thread will respond
            self._batch = {}
            return finals  # type: ignore[return-value]  # as was just checked
        with self._lock:  # responses of other threads after this are not part of the batch
            self._report_held(self._batch)
            batch, self._batch = self._batch, {}
            finals = list(batch.values())
            if None not in finals:
                return finals  # type: ignore[return-value]  # as was just checked
            for number, final in batch.items():
                if final is not None:
                    self._send_response(number, True, final)
            return []

    def open_overlapping(self, refs: Sequence[wire.RequestMessage], *, collects: bool) -> list[WorkerRequest]:
        """As `open_batch`, while other batches are open. Without `collects`, final responses are sent at once."""
        with self._lock:
            others, self._batch = self._batch, {}
            requests = self.open_batch(refs)
            if collects:
                others |= self._batch
            else:
                for number, final in self._batch.items():
                    if final is not None:  # its client has disconnected
                        self._send_response(number, True, final)
            self._batch = others
            return requests

    def close_overlapping(self, numbers: Sequence[int]) -> list[wire.ResponseMessage]:
        """As `close_batch`, for one of several open batches, with the numbers of its requests."""
        with self._lock:
            collected = [number for number in numbers if number in self._batch]
            self._report_held(collected)
            finals = {number: self._batch.pop(number) for number in collected}
            if None not in finals.values():
                return list(finals.values())  # type: ignore[arg-type]  # as was just checked
            for number, final in finals.items():
                if final is not None:
                    self._send_response(number, True, final)
            return []

    def _report_held(self, numbers: Iterable[int]) -> None:
        """Report the held inputs of these requests of open batches. Outputs in held inputs are copied: the model may
        still change them."""
        for number in self._held.ended([number for number in numbers if number not in self.live]):
            final = self._batch[number]
            if final is not None:
                try:
                    final.outputs = self._outputs.copied(final.outputs)
                except ServingError as error:
                    self._batch[number] = _failure(error)

    def send_finals(self, refs: Sequence[wire.RequestMessage], finals: Sequence[wire.ResponseMessage]) -> None:
        """Send the final responses of a batch one by one: together they are longer than a message may be."""
        for ref, final in zip(refs, finals):
            self._send_response(ref.number, True, final)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Note that the clients of these requests have disconnected. Some of their batches may not be opened yet."""
        self._cancelled.update(number for number in numbers if number in self.live or number > self._newest)
        if self._credit_waiters:
            for number in numbers:
                self._call_waiter(number)

    def given_back(self, numbers: Iterable[int]) -> None:
        """These requests were never opened and go back to the kernel, perhaps cancelled."""
        self._cancelled.difference_update(numbers)

    def grant(self, number: int, count: int) -> None:
        if number in self.live:
            self._credit[number] = self._credit.get(number, wire.CREDIT_WINDOW) + count
            if self._credit_waiters:
                self._call_waiter(number)

    def _call_waiter(self, number: int) -> None:
        """Call what waits for the credit of a request, if it has credit now."""
        if self._has_credit(number):
            waiter = self._credit_waiters.pop(number, None)
            if waiter is not None:
                waiter()

    def _has_credit(self, number: int) -> bool:
        return self._credit.get(number, 1) > 0 or number in self._cancelled or number not in self.live

    # ---- for calls of other models -----------------------------------------------------------

    @property
    def executed_by_this_thread(self) -> bool:
        """Whether this thread executes a batch."""
        return bool(self._batch) and threading.get_ident() == self._main_thread

    def possible_parents(self) -> list[int]:
        """Return the numbers of the requests for which the model may be calling another model."""
        return list(self._batch) or list(self.live)

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
        if request.response_count and self.single_response:
            self._drop(request, "another response", final)
            return
        trace = request.ref.trace
        if trace is not None and trace.tensors:
            send_outputs(request, outputs, self._send)
        try:
            refs = self._outputs.write(request, outputs, pass_on=final and request.ref.number in self._batch)
        except ServingError as error:
            self.fail(request, error, final)
            return
        self._respond(request, wire.ResponseMessage(refs, dict(parameters) if parameters else {}), final)

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        if request.response_count and self.single_response and not request.finished:
            self._drop(request, f"an error: {error.message}", final)
            return
        self._respond(request, _failure(error), final)

    def finish(self, request: WorkerRequest) -> None:
        self._respond(request, None, True)

    def reschedule(self, request: WorkerRequest) -> None:
        number = request.ref.number
        with self._lock:
            if request.finished:
                raise InternalError("a request was rescheduled after its final response")
            if number not in self._batch:
                raise InternalError("a request can be rescheduled only while it is executed")
            request.finished = True
            if request.reserved:
                self._outputs.free_reserved(request)
            del self._batch[number], self.live[number]
            self._cancelled.discard(number)
            self._credit.pop(number, None)
            if self._held.watched:
                self._held.ended([number], backend_returned=False)
            self._send(wire.Rescheduled(number))

    def is_cancelled(self, request: WorkerRequest) -> bool:
        self._reader().poll()
        return request.ref.number in self._cancelled

    def is_ahead(self, request: WorkerRequest) -> bool:
        return self._credit.get(request.ref.number, 1) <= 0 and not self._has_credit(request.ref.number)

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None:
        number = request.ref.number
        self._credit_waiters[number] = callback
        self._call_waiter(number)  # the credit may have come meanwhile

    def _drop(self, request: WorkerRequest, what: str, final: bool) -> None:
        """Drop what the client of a model that is not decoupled does not get: it has its one response (Triton)."""
        self._send(
            wire.Log(
                "ERROR", shortened(f"a request that has its response was given {what}; the client does not get it")
            )
        )
        if final:
            self.finish(request)

    # ---- sending -----------------------------------------------------------------------------

    def _respond(self, request: WorkerRequest, response: wire.ResponseMessage | None, final: bool) -> None:
        number = request.ref.number
        if not final:
            self._wait_for_credit(request)
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
                    self._call_waiter(number)
            collected = final and response is not None and request.response_count == 1 and number in self._batch
            if collected:
                self._batch[number] = response
            else:
                if final and self._held.watched:
                    self._held.ended([number], backend_returned=False)
                in_step = not final and request.loop_thread == threading.get_ident()
                self._send_response(number, final, response, in_step=in_step)

    def _send_response(
        self, number: int, final: bool, response: wire.ResponseMessage | None, *, in_step: bool = False
    ) -> None:
        """Send a response. `in_step`: a coroutine sends it, in the thread of its event loop."""
        on_device = self._outputs.on_device
        if on_device is not None and on_device.pending:  # outputs are complete before their response leaves
            on_device.wait()
        self.before_response()
        if final and self.reports.pending:  # the kernel forgets the request
            self.reports.flush()
        try:
            (self._send_in_step if in_step else self._send)(wire.Responded(number, final, response))
        except FrameTooLarge as error:
            assert response is not None
            self._outputs.free(response.outputs)
            failure = _failure(InternalError(f"the response is too long for the server: {error}"))
            self._send(wire.Responded(number, final, failure))

    def _send_in_step(self, message: wire.ToKernel) -> None:
        """Send a response of a coroutine: at once, or, if it comes fast after another one, with those that follow.

        These wait in the outbox until the coroutine awaits something. One that computes instead delays them by 2 ms:
        then the kernel looks into the outbox.
        """
        now_ns = self._now_ns()
        last_ns, self._last_ns = self._last_ns, now_ns
        if now_ns - last_ns > FAST_NS:
            self._send(message)
            return
        self._send_later(message)
        if not self._kept_since_ns:
            try:
                asyncio.get_running_loop().call_soon(self._flush_kept)
            except RuntimeError:  # the event loop has ended
                self._flush()
                return
            self._kept_since_ns = now_ns
        elif now_ns - self._kept_since_ns > MAX_KEPT_NS:
            self._flush()
            self._kept_since_ns = now_ns

    def _flush_kept(self) -> None:
        """The coroutine waits: send what it has sent."""
        self._kept_since_ns = 0
        with contextlib.suppress(OSError):  # the kernel has closed the connection, which the main thread sees, too
            self._flush()

    def _wait_for_credit(self, request: WorkerRequest) -> None:
        """Wait until the request has credit. A request whose client has disconnected does not wait."""
        credit, number = self._credit, request.ref.number
        if credit.setdefault(number, wire.CREDIT_WINDOW) <= 0 and not self._may_overshoot(request):
            if self._kept_since_ns:  # credit comes for responses that the client has
                self._flush()
            self._reader().wait_until(lambda: credit.get(number, 1) > 0 or number in self._cancelled)
        with self._lock:
            if number in credit:
                credit[number] -= 1

    def _may_overshoot(self, request: WorkerRequest) -> bool:
        """Whether this thread need not wait for credit, because it runs an event loop."""
        ahead = -self._credit.get(request.ref.number, 0)
        return ahead < MAX_OVERSHOOT and threading.get_ident() == request.loop_thread


def _nothing() -> None:
    """No metrics are reported, or no message waits."""


def _failure(error: ServingError) -> wire.ResponseMessage:
    return wire.ResponseMessage(
        error_code=error.code.value, error_text=shortened(error.message), error_before_queueing=error.before_queueing
    )
