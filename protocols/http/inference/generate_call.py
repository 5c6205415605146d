"""Bodies of /generate and /generate_stream as requests, and the call of a client whose responses a coroutine takes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kernel.records.front_doors import HTTP, Reception, at_iteration_end
from kernel.serving.request import Request
from protocols.forwarding import last_value
from protocols.http.inference.generate_codec import decode_generate
from protocols.http.inference.generate_prepared import PreparedGenerateBodies
from protocols.http.inference.tasks import DECODE_GENERATE, DecodeGenerateArguments
from protocols.intake import Decoded, HelperJob, Intake, ResponseQueue, take

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute
    from protocols.http.inference.generate_prepared import PreparedGenerateBody
    from protocols.large_requests import RequestTask
    from shm.tensor import Tensor


class GenerateHead(msgspec.Struct, frozen=True):
    """What the head of a request says."""

    route: ModelRoute
    #: Name and version as the client gave them.
    model_name: str
    model_version: str
    #: All headers as they were sent, names and values.
    headers: tuple[tuple[bytes, bytes], ...]


class GenerateIntake(Intake):
    """What all requests to /generate of one HTTP server share. No headers are forwarded (Triton)."""

    def __init__(self, kernel: KernelInterface, max_input_size: int) -> None:
        """`max_input_size` is how many bytes an input may have."""
        super().__init__(kernel)
        self._max_input_size = max_input_size
        self._bodies = PreparedGenerateBodies(max_input_size)

    def match(
        self, head: GenerateHead, body: bytes, generation: int, call: GenerateCall
    ) -> tuple[Request, PreparedGenerateBody] | None:
        request = _new_request(call)
        prepared = self._bodies.fill(request, body, generation)
        return None if prepared is None else (request, prepared)

    def decode(self, call: GenerateCall, body: bytes, received_in: ReceiveBuffer | None) -> Decoded:
        request, head = _new_request(call), call.head
        decode_generate(body, request, head.route.spec, self._max_input_size)
        # The models may have changed since the head was read.
        return Decoded(request, self.kernel.route(head.model_name, head.model_version))

    def keep(self, call: GenerateCall, body: bytes, decoded: Decoded) -> None:
        assert decoded.route is not None, "a body is kept without its route"
        self._bodies.add(body, decoded.request, decoded.route)

    def job_for_sources(self, call: GenerateCall, sources: list[Tensor]) -> tuple[Request, HelperJob]:
        """Return an empty request, and how a helper decodes a body of which `sources` are the parts."""
        route = call.head.route
        arguments = msgspec.msgpack.encode(DecodeGenerateArguments(route.spec, self._max_input_size))
        return _new_request(call), HelperJob(DECODE_GENERATE, arguments, sources, route)


def _new_request(call: GenerateCall) -> Request:
    head = call.head
    return Request(head.model_name, [], call, model_version=head.model_version, streaming=True)


class GenerateCall:
    """One request and its responses, in the order in which they come."""

    explain = False
    take = take

    def __init__(self, intake: GenerateIntake, head: GenerateHead, peer: Callable[[], str]) -> None:
        """`peer` returns who the client is; empty if it has disconnected."""
        self.intake = intake
        self.head = head
        self.request: Request | None = None
        self.decoded: PreparedGenerateBody | None = None
        self.decoding: RequestTask | None = None
        self.request_id = ""
        self.deadline_ns = 0
        #: Why the request was not submitted.
        self.error: Exception | None = None
        #: When the request came, in monotonic nanoseconds; 0 unless requests are traced.
        self.begin_ns = 0
        self._peer = peer
        self._responses = ResponseQueue()
        self._submitted: asyncio.Future[None] | None = None

    async def take_sources(self, sources: list[Tensor]) -> None:
        """As `take`, for a body that a helper decodes, of which `sources` are the parts; returns when that is done.

        The leases of `sources` are the call's from now on. Raises `ServingError` if no helper begins.
        """
        self._submitted = asyncio.get_running_loop().create_future()
        self.intake.decode_in_helper(self, *self.intake.job_for_sources(self, sources), None)
        await self._submitted

    async def next(self) -> Response:
        """Return the next response, which the caller releases. Raises the error of a request that is refused."""
        response = await self._responses.next()
        if self.request is not None:
            self.request.consumed()
        if response.refused:
            assert response.error is not None, "a refusal says why"
            raise response.error
        return response

    def close(self) -> None:
        """No more responses are taken: cancel a request that has not ended."""
        if self.decoding is not None:
            self.decoding.cancel()
            self.decoding = None
        elif self.request is not None and not self.request.finished:
            self.intake.kernel.cancel(self.request)
        self._responses.close()
        self.request = None  # it refers to its sink: such a cycle waits for the garbage collector

    # ---- protocols.intake.IntakeCall ----------------------------------------------------------

    def refused(self, error: Exception) -> None:
        self.request, self.error = None, error

    def decoded_by_helper(self) -> None:
        if self._submitted is not None and not self._submitted.done():
            self._submitted.set_result(None)

    # ---- kernel.serving.response.Sink ------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._peer()

    def header(self, name: str) -> str:
        return last_value(self.head.headers, name)

    def reception(self) -> Reception:
        """Return what traces and records say of the way in (`kernel.records.front_doors.FrontDoorSink`)."""
        return HTTP, self.begin_ns, 0, at_iteration_end

    def send(self, response: Response) -> None:
        self._responses.put(response)
