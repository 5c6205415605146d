"""The kernel's end of the connection to one door: submits its requests, and sends it their responses.

The kernel trusts a door as little as a worker: a door parses what clients send. A message that names what is not the
door's, or bytes that do not fit their form, end the door (`ValueError`, see `LoopChannel`).
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from backends.doors import messages
from backends.transport import wire
from kernel.errors import NoMemory, ServingError
from kernel.records.front_doors import GRPC, HTTP, Reception
from kernel.serving.prepared import PreparedRequest, prepare
from kernel.serving.request import REQUEST_BYTE_SIZE, Request
from kernel.serving.validation import validate
from shm.arena import INLINE_LIMIT
from shm.datatypes import DATATYPES, MAX_SIZE
from shm.lease import LeasedBlock, RegionNumber
from shm.region import FileHandle, Region, RegionKind, check_sealed, read_only_fd
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from backends.transport.channel import LoopChannel
    from kernel.serving.interface import KernelInterface
    from kernel.serving.response import Response

#: The size of tensors whose bytes have no fixed number, and of those that no model takes.
_ANY, _WRONG = -1, -2

#: The most arenas of a door: one of each model that it knows, and as many that are about to be removed.
_MOST_ARENAS = 2 * messages.MOST_ROUTES


class _Sink(msgspec.Struct, eq=False):
    """Gives the responses to one request to its door. A `kernel.records.front_doors.FrontDoorSink`."""

    requests: DoorRequests
    number: int
    form: messages.Form
    peer: str = ""

    def header(self, name: str) -> str:
        wanted, found = name.encode(), b""
        for each, value in self.form.headers:
            if each.lower() == wanted:
                found = value  # of a header that comes twice the last counts
        return found.strip(b" \t").decode(errors="surrogateescape")

    def reception(self) -> Reception:
        """The door notes no times."""
        return GRPC if self.form.grpc else HTTP, 0, 0, None

    def send(self, response: Response) -> None:
        self.requests.responded(self.number, response)


class KnownForm:
    """A form, and the prepared request that was made from the first request of the form."""

    __slots__ = ("form", "generation", "in_regions", "prepared", "sizes")

    def __init__(self, form: messages.Form) -> None:
        self.form = form
        #: Valid for `generation` of the catalog. None before the first request, and for requests that do not fit.
        self.prepared: PreparedRequest | None = None
        self.generation = -1
        #: The bytes of each input.
        self.sizes = [_byte_size(each) for each in form.request.inputs]
        self.in_regions = [each.client_span is not None for each in form.request.inputs]

    def fits(self, prepared: PreparedRequest, data: list[bytes | messages.Place | None]) -> bool:
        """Whether a request with `data` can be made from `prepared`, which was made from another one."""
        for each, size, in_region in zip(data, self.sizes, self.in_regions, strict=True):
            if type(each) is bytes:
                if len(each) != size and (size != _ANY or len(each) > INLINE_LIMIT):
                    return False
            elif each is None:
                if not in_region:
                    return False
            else:
                assert not isinstance(each, bytes), "bytes were looked at above"
                if prepared.small or size not in (_ANY, each.byte_size):
                    return False
        return True

    def new_request(self, inputs: list[Tensor], id: str, sink: _Sink) -> Request:
        """Return a request of the form that was not checked yet."""
        form, wanted = self.form, self.form.request
        outputs = [RequestedOutput(o.name, o.classification, None, o.client_span) for o in wanted.outputs]
        return Request(
            form.model_name, inputs, sink, form.model_version, id, outputs, dict(wanted.parameters),
            wanted.correlation_id, bool(wanted.flags & wire.SEQUENCE_START), bool(wanted.flags & wire.SEQUENCE_END),
            wanted.priority, wanted.timeout_us, form.streaming, form.entry_point, form.explain,
        )  # fmt: skip


def _byte_size(tensor: Tensor) -> int:
    """Return how many bytes a tensor has."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or any(each < 0 for each in tensor.shape):
        return _WRONG
    if not datatype.byte_size:
        return _ANY
    byte_size = datatype.byte_size
    for dim in tensor.shape:
        byte_size *= dim
        if byte_size > MAX_SIZE:  # the product of many dimensions takes long, and no tensor is as large
            return _WRONG
    return byte_size


class _DoorArena(msgspec.Struct):
    model_name: str
    region: Region


class DoorRequests:
    """The requests of one door that have no final response yet, and the memory that it shares with the kernel."""

    def __init__(self, kernel: KernelInterface, channel: LoopChannel, title: str) -> None:
        self._kernel = kernel
        self._channel = channel
        self._title = title
        self._forms: dict[int, KnownForm] = {}
        self._last_form = self._last_request = self._last_lease = self._forms_byte_size = 0
        #: By the number in messages.
        self._open: dict[int, Request] = {}
        #: The request that is being submitted; 0 for none.
        self._submitting = 0
        #: How many responses that are not final were sent and not taken, of requests that had such.
        self._not_taken: dict[int, int] = {}
        #: Responses whose outputs the door uses, by the number of their lease.
        self._leased: dict[int, Response] = {}
        self._arenas: dict[int, _DoorArena] = {}
        #: Number of a region → number of the door's arena.
        self._own_regions: dict[int, int] = {}
        #: Regions that the door knows.
        self._sent_regions: set[int] = set()
        #: Requests whose inputs are no longer used, and what sends them if no response does before.
        self._free_inputs: list[int] = []
        self._later: asyncio.TimerHandle | None = None
        self._closed = False
        #: How many requests were submitted.
        self.count = 0

    @property
    def open_count(self) -> int:
        """How many requests have no final response."""
        return len(self._open)

    @property
    def leased_count(self) -> int:
        """How many responses the door has not sent yet."""
        return len(self._leased)

    # ---- messages ----------------------------------------------------------------------------

    def add_form(self, message: messages.FormAdded) -> None:
        if message.number <= self._last_form or len(self._forms) >= messages.MOST_FORMS:
            raise ValueError(f"form {message.number} after form {self._last_form}, with {len(self._forms)} known")
        self._forms_byte_size += messages.form_byte_size(message.form)
        if self._forms_byte_size > messages.MOST_FORMS_BYTE_SIZE:
            raise ValueError(f"forms of {self._forms_byte_size} bytes")
        self._last_form = message.number
        self._forms[message.number] = KnownForm(message.form)

    def forget_forms(self, message: messages.FormsForgotten) -> None:
        self._forms.clear()
        self._forms_byte_size = 0

    def infer(self, message: messages.Infer) -> None:
        known = self._forms.get(message.form)
        if known is None:
            raise ValueError(f"a request of form {message.form}, which is not known")
        self._submit(known, message.number, message.data, message.id, "", message.deadline_ns)

    def infer_once(self, message: messages.InferOnce) -> None:
        known = KnownForm(message.form)
        self._submit(known, message.number, message.data, message.id, message.peer, message.deadline_ns)

    def _submit(
        self, known: KnownForm, number: int, data: list[bytes | messages.Place | None], id: str, peer: str,
        deadline_ns: int,
    ) -> None:  # fmt: skip
        if number <= self._last_request or len(data) != len(known.sizes):
            raise ValueError(f"request {number} after request {self._last_request}, with {len(data)} inputs")
        self._last_request = number
        kernel, form = self._kernel, known.form
        sink = _Sink(self, number, form, peer)
        inputs = self._inputs(known, number, data)
        self.count += 1
        prepared = known.prepared
        generation = kernel.catalog.generation
        if prepared is not None and known.generation == generation and known.fits(prepared, data):
            request = prepared.with_inputs(inputs, id, sink)
            if prepared.small and _ANY in known.sizes:
                request.byte_size = REQUEST_BYTE_SIZE + sum(each.byte_size for each in inputs)
            self._open[number] = request
            request.deadline_ns = deadline_ns
            self._submitting = number
            kernel.submit(request, prepared)
            self._submitting = 0
            return
        request = self._open[number] = known.new_request(inputs, id, sink)
        request.deadline_ns = deadline_ns
        self._submitting = number
        self._submit_new(known, number, request)
        self._submitting = 0

    def _submit_new(self, known: KnownForm, number: int, request: Request) -> None:
        """Check a request, submit it, and keep it as prepared for those of its form."""
        kernel, form = self._kernel, known.form
        generation = kernel.catalog.generation
        try:
            if form.streaming:
                route = kernel.route(form.model_name, form.model_version)
            else:
                route = kernel.unary_route(form.model_name, form.model_version, form.entry_point)
        except ServingError as error:
            # Front doors find this out before they have read the request, and respond in plain text.
            request.release_leases()
            del self._open[number]
            self._channel.send(messages.Inferred(number, True, error=_error_text(error), at_once=True))
            return
        try:
            validate(request, route.spec)
        except ServingError:
            kernel.submit(request)  # the kernel says it, unless it finds something that Triton says before
            return
        known.prepared, known.generation = prepare(request, route), generation
        kernel.submit(request, None, None, route)

    def _inputs(self, known: KnownForm, number: int, data: list[bytes | messages.Place | None]) -> list[Tensor]:
        """Return the inputs of a request, with leases of the door's blocks. Raises ValueError."""
        inputs: list[Tensor] = []
        block: LeasedBlock | None = None
        try:
            for given, each in zip(known.form.request.inputs, data, strict=True):
                tensor = Tensor(given.name, given.datatype, given.shape)
                if type(each) is bytes:
                    tensor.data = each
                elif isinstance(each, messages.Place):
                    region = self._region_of(each, known.form.model_name)
                    if block is None or block.region is not region:
                        block = LeasedBlock(region, number, self._inputs_free)
                    tensor.span = Span(block.lease(), each.offset, each.byte_size)
                elif given.client_span is not None:
                    tensor.client_span = given.client_span
                else:
                    raise ValueError(f"input '{given.name}' of request {number} has no bytes")
                inputs.append(tensor)
        except ValueError:
            for tensor in inputs:
                tensor.release()
            raise
        return inputs

    def _region_of(self, place: messages.Place, model_name: str) -> Region:
        arena = self._arenas.get(place.arena)
        if arena is None or arena.model_name != model_name:
            raise ValueError(f"an input of model '{model_name}' in arena {place.arena}, which is not its own")
        if min(place.offset, place.byte_size) < 0 or place.offset + place.byte_size > arena.region.byte_size:
            raise ValueError(f"an input at {place.offset}, outside of arena {place.arena}")
        return arena.region

    def cancel(self, message: messages.CancelInfer) -> None:
        found = (self._open.get(number) for number in message.requests)
        self._kernel.cancel(*(request for request in found if request is not None))

    def add_arena(self, message: messages.ArenaAdded) -> None:
        fd = self._channel.take_fd()
        try:
            if message.number < 1 or message.number in self._arenas:
                raise ValueError(f"arena {message.number}, which is known")
            if len(self._arenas) >= _MOST_ARENAS:
                raise ValueError(f"more than {_MOST_ARENAS} arenas")
            check_sealed(fd, message.byte_size)
        except BaseException:
            os.close(fd)
            raise
        region = Region(f"inputs of {self._title}", RegionKind.ARENA, FileHandle(fd), message.byte_size)
        self._arenas[message.number] = _DoorArena(message.model_name, region)
        self._own_regions[region.number] = message.number

    def remove_arena(self, message: messages.ArenaRemoved) -> None:
        arena = self._arenas.pop(message.number, None)
        if arena is None:
            raise ValueError(f"arena {message.number}, which is not known")
        arena.region.drop()

    def responses_taken(self, message: messages.ResponsesTaken) -> None:
        request = self._open.get(message.request)
        if request is None:
            return  # it has its final response
        left = self._not_taken.get(message.request, 0) - message.count
        if message.count < 1 or left < 0:
            raise ValueError(f"{message.count} responses were taken of request {message.request}, which has fewer")
        self._not_taken[message.request] = left
        request.consumed(message.count)

    def responses_sent(self, message: messages.ResponsesSent) -> None:
        for lease in message.leases:
            response = self._leased.pop(lease, None)
            if response is None:
                raise ValueError(f"lease {lease} of no response")
            response.release()

    # ---- responses ---------------------------------------------------------------------------

    def responded(self, number: int, response: Response) -> None:
        """Send a response to the door. Never raises."""
        request = self._open[number]
        if response.final:
            del self._open[number]
            if self._not_taken:
                self._not_taken.pop(number, None)
        else:
            self._not_taken[number] = self._not_taken.get(number, 0) + 1
        if self._closed:
            response.release()
            return
        message = messages.Inferred(number, response.final, model_version=response.model_version)
        if response.model_name != request.model_name:
            message.model_name = response.model_name
        if response.error is not None:
            message.error, message.refused = _error_text(response.error), response.refused
            message.at_once = number == self._submitting and not request.dispatched
        elif response.outputs is not None:
            message.parameters = response.parameters or None
            try:
                message.outputs = self._placed(response, message) if response.leased else response.outputs
            except OSError as error:  # no descriptor is left for a region
                response.release()
                message.outputs, message.lease = None, 0
                message.error = messages.ErrorText("unavailable", f"a response could not be sent: {error.strerror}")
        self._channel.send(message)
        if self._free_inputs:
            self._send_free_inputs()  # it wakes the door no second time

    def _placed(self, response: Response, message: messages.Inferred) -> list[Tensor]:
        """Return the outputs as the door sees them; note the response as leased if it is. Raises `OSError`."""
        placed: list[Tensor] = []
        leased = False
        for each in response.outputs or ():
            span = each.span
            if span is None:
                placed.append(each)
            elif (of_client := span.of_client) is not None:
                placed.append(Tensor(each.name, each.datatype, each.shape, None, None, of_client))
            else:
                leased = True
                place = Span(RegionNumber(self._number_of(span.lease.region)), span.offset, span.byte_size)
                placed.append(Tensor(each.name, each.datatype, each.shape, None, place))
        if leased:
            self._last_lease += 1
            message.lease = self._last_lease
            self._leased[self._last_lease] = response
        else:
            response.release()
        return placed

    def _number_of(self, region: Region) -> int:
        """Return the number by which the door knows `region`, which it gets now if it does not. Raises `OSError`."""
        own = self._own_regions.get(region.number)
        if own is not None:
            return -own
        if region.number not in self._sent_regions:
            fd = read_only_fd(region.fd)
            try:
                self._channel.send_with_fd(messages.RegionAdded(region.number, region.byte_size), fd)
            finally:
                os.close(fd)
            self._sent_regions.add(region.number)
            region.on_closed(self._region_closed)
        return region.number

    def _region_closed(self, region: Region) -> None:
        if not self._closed:
            self._sent_regions.discard(region.number)
            self._channel.send(messages.RegionRemoved(region.number))

    def _inputs_free(self, number: int) -> None:
        if self._closed:
            return
        if not self._free_inputs:
            self._later = asyncio.get_running_loop().call_later(messages.RELEASE_S, self._send_free_inputs)
        self._free_inputs.append(number)

    def _send_free_inputs(self) -> None:
        free, self._free_inputs = self._free_inputs, []
        if self._later is not None:
            self._later.cancel()
        if free and not self._closed:
            self._channel.send(messages.InputsFree(free))

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """The door is gone: cancel its requests, and release what it has used."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._kernel.cancel(*self._open.values())
        leased, self._leased = self._leased, {}
        for response in leased.values():
            response.release()
        for arena in self._arenas.values():
            arena.region.drop()


def _error_text(error: ServingError) -> messages.ErrorText:
    return messages.ErrorText(
        error.code.value, error.text, type(error).__name__, error.before_queueing, error.max_byte_size,
        isinstance(error, NoMemory) and error.retry_later,
    )  # fmt: skip
