"""`StreamingBackend`: base class of backends that send any number of responses, each request in its own thread.

A subclass yields the responses of a request in `responses`. The base class sends them with backpressure (a slow client
slows the generator down), stops when the client cancels, and sends the final response.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from typing import TYPE_CHECKING

from backends.base import Backend
from backends.worker.message_reader import KernelGone
from backends.worker.request import failure_of
from kernel.errors import RequestCancelled, ServingError
from kernel.observe.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Host
    from backends.worker.request import OutputValue, WorkerRequest

_failures = LimitedLog(logging.getLogger(__name__))

#: Seconds between two checks of a pause whether the client has cancelled the request.
_CANCEL_CHECK_S = 0.1


class StreamingBackend(Backend):
    """An instance that accepts the next request while it still responds to others. `execute` starts the threads."""

    responds_later = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.threads: set[threading.Thread] = set()
        self._ending = threading.Event()

    @abc.abstractmethod
    def responses(self, request: WorkerRequest) -> Iterator[Sequence[OutputValue] | ServingError | None]:
        """Yield the responses of `request`: the outputs of a response, or an error, after which more may follow.

        None is a response that is only counted, as an empty one (`response_stats` of the statistics).

        Runs in the request's own thread, and may call `pause`. Shapes of outputs include the batch dimension. The
        arrays of a response may be reused when the generator is resumed. The base class sends the final response. An
        exception is sent as the last response: a `ServingError` with its code and text, any other one with the code
        INTERNAL. After the client has cancelled, the generator is asked for at most one more response.
        """

    def respond_in_thread(self, request: WorkerRequest) -> threading.Event:
        """Start a thread that sends the responses of `request`, and return immediately. Call it in `execute`.

        The returned event is set if the client cancels before the last response.
        """
        cancelled = threading.Event()
        thread = threading.Thread(
            target=self._respond, args=(request, cancelled), name=f"request {request.id}", daemon=True
        )
        self.threads.add(thread)
        thread.start()
        return cancelled

    def pause(self, request: WorkerRequest, duration_s: float) -> None:
        """Wait for `duration_s` seconds, but less if the client cancels `request` or the worker ends.

        Call it only in `responses`: after the final response the worker does not know whether a client cancels.
        """
        deadline = time.monotonic() + duration_s
        while (remaining := deadline - time.monotonic()) > 0 and not request.is_cancelled():
            if self._ending.wait(min(remaining, _CANCEL_CHECK_S)):
                return

    def finalize(self) -> None:
        """End all pauses and wait for the threads."""
        self._ending.set()
        for thread in list(self.threads):
            thread.join()

    def _respond(self, request: WorkerRequest, cancelled: threading.Event) -> None:
        try:
            self._send(request, cancelled)
        except (KernelGone, ConnectionError):
            pass  # the kernel has closed the connection: there is no receiver
        finally:
            self.threads.discard(threading.current_thread())

    def _send(self, request: WorkerRequest, cancelled: threading.Event) -> None:
        started_ns, index = time.monotonic_ns(), 0
        try:
            for response in self.responses(request):
                inferred_ns = time.monotonic_ns()
                if request.is_cancelled() or self._ending.is_set():
                    request.report_response(index, started_ns, None, inferred_ns, RequestCancelled())
                    break
                error: ServingError | None = None
                if isinstance(response, ServingError):
                    error = response
                    request.fail(error, final=False)
                elif response is not None:
                    request.respond(response, final=False)
                ended_ns = time.monotonic_ns()
                request.report_response(index, started_ns, None if response is None else inferred_ns, ended_ns, error)
                started_ns, index = ended_ns, index + 1
        except (KernelGone, ConnectionError):
            raise
        except Exception as raised:
            failure = failure_of(raised, _failures)
            request.report_response(index, started_ns, None, time.monotonic_ns(), failure)
            request.fail(failure)
        else:
            if request.is_cancelled():
                cancelled.set()
            request.finish()
