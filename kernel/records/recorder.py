"""The flight recorder of a server, which exists only with `--record`: it decides what is recorded, and as what.

Requests of clients are recorded, also those that are refused after they were decoded; requests that models and
ensembles send are not, because they come again with the client's. Either each request is recorded, or every n-th
request and every n-th sequence with all its requests.

Inputs are copied, because models may change theirs. Outputs do not change: large ones stay where they are under leases
of their own, and the writer reads them there. The kernel never reads regions of clients.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import ServingError, Unavailable
from kernel.records.front_doors import front_door_of
from kernel.records.record_settings import MOST_TENSOR_BYTE_SIZE
from kernel.records.record_task import REQUEST, RESPONSE, TOO_LARGE, PassedOutput, PassedTensor
from kernel.records.record_writer import RecordWriter
from kernel.records.recording_format import first_position
from kernel.records.tracer import TraceHelpers  # noqa: TC001 - documents what the helpers are
from kernel.server_parts import RecordFigures, ServerPart
from shm.arena import INLINE_LIMIT
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.records.record_settings import RecordSettings
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response, ResponseReceiver, Sink
    from shm.arena import Block
    from shm.tensor import RequestedOutput

NO_MEMORY = "no memory was left for the recorder"

#: Tensors of a message, and its sources, with leases of their own.
Captured = tuple[list[PassedTensor], list[Tensor]]


class InputCapture:
    """Copies inputs."""

    def __init__(self, limit: int, digests: bool, memory: Callable[[int], Block]) -> None:
        """Inputs of more than `limit` bytes are left out. `memory` returns a block that the writer can read."""
        self._limit = limit
        self._digests = digests
        self._memory = memory

    def capture(self, inputs: Sequence[Tensor]) -> Captured:
        """Return copies of the inputs of a request. Of one request at most `MOST_TENSOR_BYTE_SIZE` are copied.

        Those that are too large for a message are copied into memory that the writer shares.
        """
        tensors: list[PassedTensor] = []
        sources: list[Tensor] = []
        left = MOST_TENSOR_BYTE_SIZE
        for tensor in inputs:
            passed = _described(tensor)
            tensors.append(passed)
            byte_size = passed.byte_size
            if passed.region is not None or not byte_size:
                continue
            if byte_size > left or (byte_size > self._limit and not self._digests):
                passed.missing = TOO_LARGE
                continue
            left -= byte_size
            if byte_size <= INLINE_LIMIT:
                passed.data = bytes(tensor.raw())
                continue
            try:
                block = self._memory(byte_size)
            except ServingError:
                passed.missing = NO_MEMORY
                continue
            block.view()[:byte_size] = tensor.raw()
            passed.source = len(sources)
            sources.append(Tensor(tensor.name, "UINT8", [byte_size], None, block.span))
        return tensors, sources


def capture_outputs(outputs: Sequence[Tensor]) -> Captured:
    """Return the outputs of a response."""
    tensors: list[PassedTensor] = []
    sources: list[Tensor] = []
    for tensor in outputs:
        passed = _described(tensor)
        tensors.append(passed)
        if tensor.data is not None:
            passed.data = bytes(tensor.data)
        elif passed.region is None and passed.byte_size:
            assert tensor.span is not None, f"output '{tensor.name}' has no place"
            passed.source = len(sources)
            sources.append(Tensor(tensor.name, "UINT8", [passed.byte_size], None, tensor.span.shared()))
    return tensors, sources


def capture_requested(outputs: Sequence[RequestedOutput]) -> list[PassedOutput]:
    """Return the requested outputs."""
    return [PassedOutput(output.name, output.classification, None, output.region_of_client) for output in outputs]


def _described(tensor: Tensor) -> PassedTensor:
    return PassedTensor(
        tensor.name, tensor.datatype, tensor.shape, None, None, tensor.region_of_client, tensor.byte_size
    )


#: The most sequences that are recorded at a time. One that never ends is forgotten after that number of others.
MAX_SEQUENCES = 1 << 16


class RecordSampler:
    """Counts requests that could be recorded: for the server, and for each model with a rate of its own."""

    def __init__(self, rate: int, model_rates: Mapping[str, int]) -> None:
        """`rate` is 1 for each request, 0 for none."""
        self._rates = {"": rate, **model_rates}
        self._counts = dict.fromkeys(self._rates, 0)
        #: Model and id of the recorded sequences that have not ended, the oldest first.
        self._sequences: dict[tuple[str, int | str], None] = {}

    def is_recorded(self, model: str) -> bool:
        """Count a request without a sequence, or a sequence that begins; the first one is recorded."""
        name = model if model in self._rates else ""
        rate = self._rates[name]
        if rate <= 1:
            return rate == 1
        count = self._counts[name]
        self._counts[name] = (count + 1) % rate
        return not count

    def is_recorded_of_sequence(self, model: str, id: int | str, *, start: bool, end: bool) -> bool:
        """Return whether a request of a sequence is recorded: all of them are, or none.

        A sequence that had begun before the recorder is not recorded.
        """
        key = (model, id)
        if start:
            self._sequences.pop(key, None)
            if not self.is_recorded(model):
                return False
            if not end:
                self._sequences[key] = None
                if len(self._sequences) > MAX_SEQUENCES:
                    del self._sequences[next(iter(self._sequences))]
            return True
        if key not in self._sequences:
            return False
        if end:
            del self._sequences[key]
        return True


class RecordOutput(Protocol):
    """Takes messages for the helper."""

    def put(self, message: tuple[Any, ...], sources: Sequence[Tensor] = ()) -> bool:
        """Write the record of `message` soon: the fields of a `PassedRequest` or `PassedResponse` behind its tag.

        The leases of `sources`, which have the bytes of its tensors, are the output's from now on. Never waits. Returns
        whether there was room.
        """


class Recorder:
    """Records the requests of one server."""

    def __init__(
        self,
        settings: RecordSettings,
        output: RecordOutput,
        *,
        now_ns: Callable[[], int],
        memory: Callable[[int], Block],
    ) -> None:
        """`memory` returns a block that the output can read."""
        self._put = output.put
        self._now_ns = now_ns
        self._inputs = InputCapture(settings.tensor_limit, settings.input_digests, memory)
        self._sampler = RecordSampler(settings.rate, dict(settings.model_rates))
        #: Whether each request is recorded that belongs to no sequence.
        self._all = settings.rate == 1 and not settings.model_rates
        self._last_number = 0

    def begin(self, request: Request, model: Model) -> None:
        """Record a checked request if it is its turn."""
        if request.parent is not None:
            return
        if not (self._all and model.spec.sequence_batching is None) and not self._is_recorded(request, model):
            return
        if request.leased:
            number = self._record_copy(request, model, request.received_ns)
        else:
            # The usual case, without further calls: all tensors are in messages.
            spec, sink = model.spec, request.sink
            self._last_number = number = self._last_number + 1
            if not self._put((
                REQUEST, number, request.received_ns, spec.name, model.version, request.inputs, request.model_version,
                request.id, request.outputs, request.parameters, request.correlation_id, request.sequence_start,
                request.sequence_end, spec.sequence_batching is not None, request.priority, request.timeout_us,
                spec.decoupled, _protocol_of(sink),
            )):  # fmt: skip
                return
        if number:
            inner = request.passage or request.sink
            request.passage = RecordedPassage(inner, self._put, self._now_ns, number, request)

    def refused(self, request: Request, model: Model, error: ServingError) -> None:
        """Record a request that was decoded, and refused before it was queued, if it is its turn."""
        if request.parent is not None or not self._is_recorded(request, model):
            return
        now_ns = self._now_ns()
        number = self._record_copy(request, model, request.received_ns or now_ns)
        if number:
            self._put((RESPONSE, number, now_ns, True, "", None, None, error.text, error.code.value, 0))

    def _is_recorded(self, request: Request, model: Model) -> bool:
        if model.spec.sequence_batching is None:
            return self._sampler.is_recorded(model.name)
        return self._sampler.is_recorded_of_sequence(
            model.name, request.correlation_id, start=request.sequence_start, end=request.sequence_end
        )

    def _record_copy(self, request: Request, model: Model, at_ns: int) -> int:
        """Record a request whose tensors may be anywhere; returns its number, 0 if there was no room."""
        self._last_number = number = self._last_number + 1
        inputs, sources = self._inputs.capture(request.inputs)
        spec, requested = model.spec, capture_requested(request.outputs)
        recorded = self._put((
            REQUEST, number, at_ns, spec.name, model.version, inputs, request.model_version, request.id, requested,
            request.parameters, request.correlation_id, request.sequence_start, request.sequence_end,
            spec.sequence_batching is not None, request.priority, request.timeout_us, spec.decoupled,
            _protocol_of(request.sink),
        ), sources)  # fmt: skip
        return number if recorded else 0


class RecordedPassage(msgspec.Struct, eq=False):
    """What the responses pass of one request that is recorded. Implements `ResponseReceiver`."""

    #: What gets the responses next: the trace, or the sink of the request.
    inner: ResponseReceiver
    #: As in `RecordOutput`; None after a response that found no room: then the later ones are not recorded.
    put: Callable[..., bool] | None
    now_ns: Callable[[], int]
    number: int
    #: None after the final response, so that the request and its sink are no cycle.
    request: Request | None

    def send(self, response: Response) -> None:
        request, put = self.request, self.put
        assert request is not None, "a response after the final one"
        queued_ns = 0
        if response.final:
            queued_ns = request.queue_start_ns
            self.request = None
        if put is not None:
            outputs: Sequence[Any] | None = response.outputs
            sources: Sequence[Tensor] = ()
            if response.leased:
                outputs, sources = capture_outputs(response.outputs or ())
            error = response.error
            if not put((
                RESPONSE, self.number, self.now_ns(), response.final, response.model_version, outputs,
                response.parameters, "" if error is None else error.text, "" if error is None else error.code.value,
                queued_ns,
            ), sources):  # fmt: skip
                self.put = None
        self.inner.send(response)


def _protocol_of(sink: Sink) -> str:
    """Return the protocol of a sink; empty if the request did not come over one."""
    door = front_door_of(sink)
    return "" if door is None else door.reception()[0].protocol


logger = logging.getLogger(__name__)

#: How long the last records may take to be written when the server stops, in seconds.
CLOSE_TIMEOUT_S = 5.0

_LOCK = "lock"


class Recording(ServerPart):
    """Records the requests of `kernel` from its start until it is closed. A part of the server."""

    def __init__(self, kernel: Kernel, helpers: TraceHelpers, settings: RecordSettings) -> None:
        """`helpers` have no other tasks; `close` closes them. Raises `ServingError` if the folder cannot be used."""
        folder = os.path.abspath(settings.folder)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._lock = _locked(folder)
            position = first_position(os.listdir(folder))
        except OSError as error:
            raise Unavailable(f"--record: '{folder}' cannot be written: {error.strerror}") from None
        self._folder = folder
        self._kernel = kernel
        self._helpers = helpers
        self._writer = RecordWriter(
            helpers, folder, secrets.token_hex(8), settings, position, lambda: kernel.record_by(None)
        )
        self._recorder = Recorder(
            settings,
            self._writer,
            now_ns=time.monotonic_ns,
            memory=kernel.memory_for_helper,
        )

    async def start(self) -> None:
        """Record from now on."""
        self._kernel.record_by(self._recorder)
        logger.info("the flight recorder writes requests and responses to '%s'", self._folder)

    def figures(self) -> RecordFigures:
        return RecordFigures(self._writer.written_count, self._writer.lost_count)

    async def close(self) -> None:
        """Write what waits, and end the helpers."""
        self._kernel.record_by(None)
        await self._writer.close(CLOSE_TIMEOUT_S)
        await self._helpers.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _locked(folder: str) -> int:
    """Return a descriptor that keeps other servers from the folder while it is open. Raises `ServingError`, OSError."""
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        error: ServingError = Unavailable(f"--record: another server records in '{folder}'")
        raise error from None
    return lock
