"""The requests to a model that one request of a client becomes, and their responses in the order in which they come.

`SilenceWatch` is one timer for all streams of a server: clients and proxies give up connections on which nothing comes
for long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kernel.records.front_doors import HTTP, Reception, at_iteration_end
from kernel.records.trace import FIRST_TOKEN
from kernel.serving.request import Request
from protocols.forwarding import last_value
from protocols.intake import Decoded, Intake, take

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute
    from protocols.forwarding import ForwardedHeaders
    from protocols.large_requests import RequestTask
    from protocols.openai.api_keys import ApiKey
    from shm.tensor import Tensor

    #: Responses, or why there is none, with what they are for, in the order in which they came.
    Arrived = deque[tuple["ChoiceCall", Response | Exception]]

#: The header, in lower case, whose value is the name of the client's API key, whatever the client has sent.
KEY_NAME_HEADER = "naiad-api-key"


class GenerationHead(msgspec.Struct, frozen=True):
    """What all requests of one client's request have in common."""

    route: ModelRoute
    model_name: str
    request_id: str
    #: All headers as they were sent, names and values.
    headers: tuple[tuple[bytes, bytes], ...]
    #: Returns who the client is; empty if it has disconnected.
    peer: Callable[[], str]
    #: The API key of the client; None if it needs none.
    key: ApiKey | None = None


class GenerationIntake(Intake):
    """What all requests of one OpenAI server share. Their inputs were decoded before: a message is a list of them."""

    def __init__(
        self, kernel: KernelInterface, forwarded: Callable[[ChoiceCall], ForwardedHeaders | None] | None
    ) -> None:
        super().__init__(kernel, forwarded)
        self.match = _match_nothing

    def decode(self, call: ChoiceCall, message: Sequence[Tensor], received_in: ReceiveBuffer | None) -> Decoded:
        head = call.head
        request = Request(head.model_name, list(message), call, id=head.request_id, streaming=True)
        request.leased = any(tensor.span is not None for tensor in message)
        # The models may have changed since the body was decoded.
        return Decoded(request, self.kernel.route(head.model_name))


def _match_nothing(head: object, message: object, generation: int, call: object) -> None:
    """Return None: no message equals an earlier one."""


class Generation:
    """Collects the responses of all choices for one coroutine."""

    def __init__(self, intake: GenerationIntake, head: GenerationHead, begin_ns: int) -> None:
        """`begin_ns` is when the client's request came, in monotonic nanoseconds; 0 unless requests are traced."""
        self.intake = intake
        self.head = head
        self.begin_ns = begin_ns
        self.calls: list[ChoiceCall] = []
        self._arrived: Arrived = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        #: Seconds of silence, as `SilenceWatch` counts them.
        self.silent_s = 0

    def submit(self, number: int, inputs: Sequence[Tensor]) -> None:
        """Submit the request of choice `number`, which owns the leases of `inputs` from now on."""
        call = ChoiceCall(self, number)
        self.calls.append(call)
        take(call, inputs)

    async def wait(self) -> bool:
        """Wait for a response. Returns False if the client should hear something, because none has come for long."""
        if not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return bool(self._arrived)

    def arrived(self) -> Arrived:
        """Return what has come, in order. The caller takes it from there, and releases the responses."""
        return self._arrived

    @property
    def waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def wake(self) -> None:
        """Let `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, call: ChoiceCall, response: Response | Exception) -> None:
        if self._closed:
            if not isinstance(response, Exception):
                response.release()
            return
        self._arrived.append((call, response))
        waiter = self._waiter  # as `wake`, without its call
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """No more responses are taken: cancel the requests that have not ended."""
        self._closed = True
        while self._arrived:
            _, response = self._arrived.popleft()
            if not isinstance(response, Exception):
                response.release()
        for call in self.calls:
            call.cancel()
            call.request = None  # it refers to its sink: such a cycle waits for the garbage collector


class ChoiceCall:
    """The request for one choice, or for all of them. A `protocols.intake.IntakeCall`."""

    explain = False

    __slots__ = (
        "_generation",
        "deadline_ns",
        "decoded",
        "decoding",
        "ended",
        "head",
        "intake",
        "number",
        "request",
        "request_id",
    )

    def __init__(self, generation: Generation, number: int) -> None:
        self._generation = generation
        self.intake = generation.intake
        self.head = generation.head
        self.number = number
        self.request: Request | None = None
        self.decoded: None = None
        self.decoding: RequestTask | None = None
        self.deadline_ns = 0
        #: Whether nothing more of the choice is needed.
        self.ended = False
        self.request_id = generation.head.request_id

    def consumed(self, count: int) -> None:
        """`count` responses were taken: the model may send the same number again."""
        if self.request is not None:
            self.request.consumed(count)

    def first_token_came(self, at_ns: int) -> None:
        """Note it in the request's trace, if it has one that goes on."""
        request = self.request
        if request is not None and request.trace is not None and not request.trace.has_ended:
            request.trace.stamp(FIRST_TOKEN, at_ns)

    def cancel(self) -> None:
        """Cancel the request if it has not ended. Its responses are not needed."""
        if self.request is not None and not self.request.finished:
            self.intake.kernel.cancel(self.request)

    def refused(self, error: Exception) -> None:
        self.request = None
        self._generation.put(self, error)

    def decoded_by_helper(self) -> None:
        """Never called: no helper decodes."""

    # ---- kernel.serving.response.Sink ------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self.head.peer()

    def header(self, name: str) -> str:
        """Return a header of the client. With API keys, one is the name of its key: fair shares and quotas go by it."""
        if name == KEY_NAME_HEADER and self.head.key is not None:
            return self.head.key.name
        return last_value(self.head.headers, name)

    def reception(self) -> Reception:
        """Return what traces and records say of the way in (`kernel.records.front_doors.FrontDoorSink`)."""
        return HTTP, self._generation.begin_ns, 0, at_iteration_end

    def send(self, response: Response) -> None:
        self._generation.put(self, response)


#: How often streams are looked at, in seconds.
TICK_S = 1

#: After this time without a response the head of a stream is sent: its status can no longer say that it has failed.
HEAD_AFTER_S = 1

#: After this time without a chunk a stream gets a comment.
COMMENT_AFTER_S = 15


class SilenceWatch:
    """Wakes streams that wait for a model for long. The timer runs while there are streams."""

    def __init__(self) -> None:
        #: Stream → the seconds after which it is woken.
        self._streams: dict[Generation, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def add(self, stream: Generation) -> None:
        """Wake `stream` when it should begin. The caller removes it."""
        self._streams[stream] = HEAD_AFTER_S
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def begun(self, stream: Generation) -> None:
        """The head of `stream` was sent: wake it when a comment is due."""
        self._streams[stream] = COMMENT_AFTER_S

    def remove(self, stream: Generation) -> None:
        self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._streams else None

    def look(self) -> None:
        """A second has passed: wake the streams that have been silent for too long."""
        for stream, limit_s in self._streams.items():
            if not stream.waits:
                continue
            stream.silent_s += TICK_S
            if stream.silent_s >= limit_s:
                stream.silent_s = 0
                stream.wake()
