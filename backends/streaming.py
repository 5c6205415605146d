"""The base of backends that answer a request with any number of responses, each request in a thread of its own.

A backend says in `responses` what a request gets; this sends it, at the pace of the client, and sees to the end.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from typing import TYPE_CHECKING

from backends.base import Backend
from backends.worker.message_reader import KernelGone
from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Host
    from backends.worker.request import OutputValue, WorkerRequest

logger = logging.getLogger(__name__)

#: How often a pause looks whether somebody still waits for its end.
_LOOK_S = 0.1


class StreamingBackend(Backend):
    """One instance, which takes the next request while it is still answering others."""

    answers_later = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._threads: set[threading.Thread] = set()
        self._ending = threading.Event()

    @abc.abstractmethod
    def responses(self, request: WorkerRequest) -> Iterator[Sequence[OutputValue] | ServingError]:
        """Give each response as it comes: its outputs, or an error after which others may follow.

        Runs in a thread of its own, and may `pause`. What is raised is the last response. Of a request whose
        client has gone no more than one response is asked for.
        """

    def answer(self, request: WorkerRequest) -> threading.Event:
        """Begin to answer `request`; returns at once. For `execute`.

        The event is set if the client goes before it has all responses.
        """
        gone = threading.Event()
        thread = threading.Thread(target=self._answer, args=(request, gone), name=f"request {request.id}", daemon=True)
        self._threads.add(thread)
        thread.start()
        return gone

    def pause(self, request: WorkerRequest, duration_s: float) -> None:
        """Wait, but not for nothing: it is over when the client of `request` goes, or the worker ends.

        For `responses`: of a request that has its last response nobody knows whether its client has gone.
        """
        deadline = time.monotonic() + duration_s
        while (remaining := deadline - time.monotonic()) > 0 and not request.is_cancelled():
            if self._ending.wait(min(remaining, _LOOK_S)):
                return

    def finalize(self) -> None:
        """End every pause, and wait for the threads: no request is open any more."""
        self._ending.set()
        for thread in list(self._threads):
            thread.join()

    def _answer(self, request: WorkerRequest, gone: threading.Event) -> None:
        try:
            self._send(request, gone)
        except (KernelGone, ConnectionError):
            pass  # nobody is left to be answered
        finally:
            self._threads.discard(threading.current_thread())

    def _send(self, request: WorkerRequest, gone: threading.Event) -> None:
        try:
            for response in self.responses(request):
                if request.is_cancelled() or self._ending.is_set():
                    break
                if isinstance(response, ServingError):
                    request.fail(response, final=False)
                else:
                    request.respond(response, final=False)
        except (KernelGone, ConnectionError):
            raise
        except ServingError as error:
            request.fail(error)
        except Exception as error:
            logger.exception("the model failed")
            request.fail(InternalError(f"{type(error).__name__}: {error}"))
        else:
            if request.is_cancelled():
                gone.set()
            request.finish()
