"""The way of an inference request from its message to the kernel: the same for all front doors.

A message that equals an earlier one becomes a copy of a prepared request. Any other is decoded, in the event loop or by
a helper, checked, and remembered. What is specific to a protocol are the methods of its `Intake`.

Responses come to the call itself. `OnlyResponse` is for calls that need exactly one, `ResponseQueue` for coroutines: it
owns the responses in it until the front door takes them, and releases those that are not taken.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import InternalError, InvalidRequest, ServingError
from kernel.records.traced_passage import take_explain
from kernel.serving.validation import validate
from protocols.large_requests import RequestTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute
    from protocols.forwarding import ForwardedHeaders
    from protocols.loop_budgets import MessageBudget
    from shm.tensor import Tensor


class IntakeCall(Protocol):
    """The call of a client, for which an intake makes a request. It is the sink of the request."""

    #: The intake of the call's protocol.
    intake: Any
    #: What came before the message, for `Intake.match` and `Intake.decode`.
    head: Any
    #: Set before the request is submitted.
    request: Request | None
    #: What the response needs of the request: a prepared message, or `Decoded.options`. Set with `request`.
    decoded: Any
    #: Has a helper decode the request; None unless it does that now.
    decoding: RequestTask | None
    #: The id of the request, for logs.
    request_id: str
    #: When the client gives up, in monotonic nanoseconds; 0 if that is not known.
    deadline_ns: int

    @property
    def explain(self) -> bool:
        """Whether the head asks for an explanation (`X-Naiad-Explain`)."""

    def refused(self, error: Exception) -> None:
        """Respond with `error`: no request is submitted. `request` is what was decoded of it, None for nothing."""

    def decoded_by_helper(self) -> None:
        """The request, which a helper has decoded, was submitted or refused: the next message may be taken."""

    @property
    def peer(self) -> str:
        """Who the client is, as a `kernel.serving.response.Sink` has it."""

    def header(self, name: str) -> str:
        """Return a header of the call, "" without it."""

    def send(self, response: Response) -> None:
        """Take a response to the request. Called once for each, until the final one."""


class Decoded(msgspec.Struct):
    """A request that was decoded in the event loop."""

    request: Request
    #: The route of the request; None if the request does not fit its signature.
    route: ModelRoute | None
    #: What the response needs to know.
    options: Any = None


class HelperJob(msgspec.Struct):
    """How a helper decodes a message."""

    #: The name of the function, and its arguments.
    name: str
    arguments: bytes
    #: The message. The job owns the leases.
    sources: list[Tensor]
    #: The route of the request; None if only the helper finds that out.
    route: ModelRoute | None = None


class Intake(ABC):
    """What all calls of one kind share: how messages become requests, and what is remembered of earlier messages."""

    #: Returns the request in a message and the prepared message that it equals; None if the message has to be decoded.
    #: Its arguments: `IntakeCall.head`, the message, the generation of the catalog, the call.
    match: Callable[[Any, Any, int, Any], tuple[Request, Any] | None]

    def __init__(
        self, kernel: KernelInterface, forwarded: Callable[[Any], ForwardedHeaders | None] | None = None
    ) -> None:
        """`forwarded` returns the headers of a call that become parameters, None for none, or raises `ServingError`.

        It is None where no headers of any call do.
        """
        self.kernel = kernel
        self.forwarded = forwarded
        #: Why no more requests are taken, because the front door stops; None as long as they are.
        self.refusal: ServingError | None = None
        #: Where the time counts that it takes to decode messages; None where each has an iteration of its own.
        self.messages: MessageBudget | None = None

    @abstractmethod
    def decode(self, call: Any, message: Any, received_in: ReceiveBuffer | None) -> Decoded | None:
        """Return what is in a message that `match` does not know; None if a helper is to decode it.

        Raises what is wrong with the message.
        """

    def keep(self, call: Any, message: Any, decoded: Decoded) -> None:  # noqa: B027 - some find no two requests equal
        """Remember a message whose request was checked, if `match` can recognise the next one."""

    def helper_job(self, call: Any, message: Any, received_in: ReceiveBuffer | None) -> tuple[Request, HelperJob]:
        """Return an empty request, and how a helper decodes `message` into it. Raises `ServingError`."""
        raise AssertionError("a message that `decode` has left to a helper, and of this kind none needs one")

    def read_options(self, octets: bytes, route: ModelRoute) -> Any:
        """Return what the response needs to know, as the helper has found it; None for nothing.

        The request is for `route`.
        """
        return None

    def decode_in_time(self, call: IntakeCall, message: Any, received_in: ReceiveBuffer | None) -> Decoded | None:
        """As `decode_and_check`; counts the time."""
        messages = self.messages
        if messages is None:
            return self.decode_and_check(call, message, received_in)
        begin_ns = monotonic_ns()
        try:
            return self.decode_and_check(call, message, received_in)
        finally:
            messages.spent(monotonic_ns() - begin_ns)

    def decode_and_check(self, call: IntakeCall, message: Any, received_in: ReceiveBuffer | None) -> Decoded | None:
        """As `decode`; a request that fits its model is remembered."""
        decoded = self.decode(call, message, received_in)
        if decoded is None:
            return None
        request, route = decoded.request, decoded.route
        assert route is not None, "a message was decoded without its route"
        request.explain = call.explain or take_explain(request)
        try:
            validate(request, route.spec)
        except InvalidRequest:
            decoded.route = None  # the kernel says so, unless it finds something that Triton says before
        else:
            self.keep(call, message, decoded)
        return decoded

    def decode_in_helper(
        self, call: IntakeCall, request: Request, job: HelperJob, forwarded: ForwardedHeaders | None
    ) -> None:
        """Submit `request` when a helper has decoded it. Raises `ServingError`; then the leases of `job` have ended."""
        task = RequestTask(
            self.kernel, job.route, request, _Decoding(call, forwarded), job.name, job.arguments, job.sources
        )
        call.request, call.decoding = request, task
        try:
            task.start()
        except ServingError:
            call.decoding = None
            raise


class _ByHelper(msgspec.Struct):
    """A request that a helper has decoded. `begin_preparing` has admitted it."""

    request: Request
    route: ModelRoute
    #: For `Intake.read_options`.
    options: bytes
    forwarded: ForwardedHeaders | None


def take(
    call: IntakeCall, message: Any, received_in: ReceiveBuffer | None = None, by_helper: _ByHelper | None = None
) -> None:
    """Submit the request in `message`, or respond with what is wrong with it. Never waits, never raises.

    Calls have it as a method. `received_in` is the buffer that has the message, if any; it stays the caller's to
    release. A message that a helper has to decode comes here once more `by_helper`.
    """
    intake = call.intake
    kernel = intake.kernel
    try:
        if by_helper is None:
            if intake.refusal is not None:
                raise intake.refusal
            forwarded = None if intake.forwarded is None else intake.forwarded(call)
            found = intake.match(call.head, message, kernel.catalog.generation, call)
            if found is not None and (received_in is None or received_in.of_model):
                request, decoded = found
                prepared, route = decoded.common, None
            else:
                new = intake.decode_in_time(call, message, received_in)
                if new is None:
                    intake.decode_in_helper(call, *intake.helper_job(call, message, received_in), forwarded)
                    return
                request, decoded, prepared, route = new.request, new.options, None, new.route
        else:
            request, forwarded, prepared, route = by_helper.request, by_helper.forwarded, None, None
            decoded = intake.read_options(by_helper.options, by_helper.route)
            request.explain = call.explain or take_explain(request)
        call.request, call.decoded, call.request_id = request, decoded, request.id
        if call.deadline_ns:
            request.deadline_ns = call.deadline_ns
        if forwarded is not None:
            request.parameters = forwarded.added_to(request.parameters)
    except Exception as error:
        if by_helper is not None:
            call.request_id = by_helper.request.id
            by_helper.request.release_leases()
        call.refused(error)
        return
    kernel.submit(request, prepared, received_in, route, admitted=by_helper is not None)


class _Decoding(msgspec.Struct, eq=False):
    """Waits for a request that a helper decodes. A `protocols.large_requests.Preparing`."""

    call: IntakeCall
    forwarded: ForwardedHeaders | None

    def prepared(self, response_options: bytes, route: ModelRoute) -> None:
        call = self.call
        request, call.decoding = call.request, None
        assert request is not None, "the request was cancelled"
        take(call, None, None, _ByHelper(request, route, response_options, self.forwarded))
        call.decoded_by_helper()

    def refused(self, error: ServingError) -> None:
        self.call.decoding = None
        self.call.refused(error)
        self.call.decoded_by_helper()


class OnlyResponse:
    """Checks that a call with one response gets exactly one, which is final or followed by the final flag."""

    __slots__ = ("_count", "_response")

    def __init__(self) -> None:
        self._response: Response | None = None
        self._count = 0

    def add(self, response: Response) -> bool:
        """Take one more response. Returns whether it was the last one: then call `take`."""
        if not response.empty:
            self._count += 1
            if self._response is not None:
                self._response.release()
            self._response = response
        return response.final

    def take(self) -> Response:
        """Return the response, which the caller releases. Raises `InternalError` if there was not exactly one."""
        found, self._response = self._response, None
        if found is not None and self._count == 1:
            return found
        if found is not None:
            found.release()
        raise InternalError(f"expected a single response, got {self._count}")


class ResponseQueue:
    """The responses of a request, in the order in which they came, for a coroutine.

    The credit of the request bounds it: a model may send only a limited number of responses that are not consumed.
    """

    def __init__(self) -> None:
        self._responses: deque[Response] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def next(self) -> Response:
        """Return the next response; the caller releases it."""
        while not self._responses:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._responses.popleft()

    def close(self) -> None:
        """No more responses are taken: release those that are here, and those that still come."""
        self._closed = True
        while self._responses:
            self._responses.popleft().release()

    def put(self, response: Response) -> None:
        if self._closed:
            response.release()
            return
        self._responses.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
