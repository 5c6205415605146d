"""All messages between the kernel and a worker process. The whole protocol is in this file, so the file is long.

A message is a msgpack array whose first element is the tag. `backends/transport/framing.py` adds the length before it.
Kernel and worker have the same code, so nothing is negotiated: each says in its first message which code it has
(`PROTOCOL`), and refuses another one. So a server whose package was upgraded while it runs starts no worker of the new
code, and a worker of another host is refused before a message is misread.

The class of a message is all that is to be written for a new one, and its handler on the other side: its base says who
takes it, and both decoders are made from the bases.

Sessions. `Attach`, `ArenaCreated` and `OutboxCreated` are sent with a file descriptor, which needs two processes on one
machine, and so does `OwnArena`. `AddMember` has a descriptor or an address. `Hello.local` says whether a session has
them. A session without them copies: `Transfer` announces a region, `Chunk` messages carry its bytes, and tensors name
spans of it as they name spans of attached regions. `Detach` ends both kinds of region at the worker. The kernel frees a
region that a worker transferred itself.

Places. A tensor is inline, or in a span; a message has the number of the span's region (`shm.tensor.encode_lease`). The
kernel's regions have numbers above 0. `OUTPUT_ARENA` is the worker's own arena, in both directions, and numbers below 0
are its arenas on a device.

Order. With a concurrency of 1 a worker handles `Execute` messages in order, each with any number of `Responded` and one
`Executed`. It starts a batch only when the previous `Executed` is sent or in its outbox
(`backends/transport/outbox.py`). The outbox also says which batch the worker has begun last, and whether the model got
it; so the kernel knows how far a dead worker was. With a higher concurrency the worker sends `Started` for each batch,
and `Executed` may come in any order. A decoupled model may respond after `Executed`.

Times are monotonic nanoseconds of the worker's clock. On one machine that is the kernel's clock; otherwise the session
adds the difference that it computes from `Hello.now_ns`.

Calls of other models. A worker sends `Submit` at any time after `Loaded`, from any of its threads; `CallResponded`
brings the responses of the call in order, with at most one that is final. `ControlModel` may come before `Loaded` too.
"""

from __future__ import annotations

import functools
import operator
import signal
from typing import Callable, TypeVar, Union

import msgspec

from kernel.records.trace import TracedTensor  # noqa: TC001 - msgspec reads it
from kernel.version import __version__
from shm.tensor import Buffer, RequestedOutput, Span, Tensor, decode_lease, encode_lease

#: The version of the messages, increased with each change, and that of the code on both of their sides.
PROTOCOL = f"16 of {__version__}"

#: The signal at which a worker writes the stacks of its threads to standard error. Models use SIGUSR1 and SIGUSR2, and
#: sometimes the first and the last signals of this kind.
STACKS_SIGNAL = signal.SIGRTMAX - 7

#: The region number of the worker's own output arena.
OUTPUT_ARENA = 0

#: How many responses of a request a worker may have sent that the client has not taken (credit).
CREDIT_WINDOW = 64

#: The most reports of each kind in one `Reported`.
MAX_REPORTS = 1024

#: The most bytes in one `Chunk`. Other messages can be sent between two chunks.
CHUNK_BYTE_SIZE = 256 << 10

#: Without shared memory: tensors of up to this many bytes together are in the message of their request or response.
#: Each other tensor is a transfer before it, with its own messages.
SENT_INLINE_BYTE_SIZE = 32 << 10

#: The first number of regions that a worker transfers: larger than all numbers of the kernel.
FIRST_TRANSFER_OF_WORKER = 1 << 62

#: `RequestMessage.flags` (TRITONSERVER_REQUEST_FLAG_*).
SEQUENCE_START, SEQUENCE_END = 1, 2

#: A `Union`: workers may run on Python 3.9, which has no `|` of its own types.
ParameterValue = Union[str, int, bool, float]

_Kind = TypeVar("_Kind", bound="Message")


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all messages. A message is listed once: by the base of its class, which says who takes it and when."""


class ToWorker(Message):
    """Base of messages from the kernel. The worker's main thread handles them in order, unless they are `Urgent`."""


class Urgent(ToWorker):
    """Base of messages that the worker handles at once, in the thread that reads them. Messages about regions are
    among them: a response to a call may name a region while the main thread waits for it."""


class ToKernel(Message):
    """Base of messages from a worker."""


class StartResponse(ToKernel):
    """Base of messages with which a worker responds to a step of its start."""


#: What handles messages: a function by their class.
Handlers = dict[type, Callable[..., None]]


def kinds_of(base: type[_Kind]) -> list[type[_Kind]]:
    """Return the classes of messages with this base."""
    kinds: list[type[_Kind]] = []
    for kind in base.__subclasses__():
        for found in kinds_of(kind) if kind in _BASES else [kind]:
            if found not in kinds:
                kinds.append(found)
    return kinds


_BASES = (Message, ToWorker, Urgent, ToKernel, StartResponse)


class TraceContext(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The trace of a request. The worker may send activities of the model for it."""

    #: The W3C trace context for what the model calls while it executes; empty without OpenTelemetry.
    traceparent: str = ""
    tracestate: str = ""
    #: Whether the worker sends the tensors of the request (`TensorsTraced`).
    tensors: bool = False


class SequenceEntry(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The entry of a request in a batch of sequences. The worker adds control tensors and implicit state."""

    #: The worker stores implicit state by slot.
    slot: int
    #: Padding of the batch: there is no request, and no response follows.
    empty: bool = False


class RequestMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request of a batch, or of a call of another model. `number` is unique for the worker's lifetime."""

    number: int
    inputs: list[Tensor]
    #: Destinations of outputs; empty for all outputs in the response. See `RequestedOutput`.
    outputs: list[RequestedOutput] = []
    id: str = ""
    #: `SEQUENCE_START` and `SEQUENCE_END`.
    flags: int = 0
    correlation_id: int | str = 0
    priority: int = 0
    timeout_us: int = 0
    parameters: dict[str, ParameterValue] = {}
    sequence: SequenceEntry | None = None
    trace: TraceContext | None = None


class ResponseMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One response. With `error_code` set there are no outputs.

    The kernel owns a block of the output arena that `outputs` name until it sends `FreeBlocks`. A final response may
    name a span within an input of its request, in an arena of the kernel. With a span of a client's region, the worker
    has written the output there.
    """

    outputs: list[Tensor] = []
    parameters: dict[str, ParameterValue] = {}
    error_code: str = ""
    error_text: str = ""
    #: Whether Triton detects the error before it queues the request (`ServingError.before_queueing`).
    error_before_queueing: bool = False


class MetricFamilyRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A family of metrics that the model has defined; `kind` is a value of `MetricKind`."""

    name: str
    description: str
    kind: str


class MetricSeriesRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A series of a family. `number` is unique for the worker's lifetime."""

    number: int
    family: str
    labels: dict[str, str] = {}
    #: Upper bounds of a histogram's buckets, ascending, without infinity.
    buckets: list[float] = []


class MetricChange(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The change of a series since the last message: of its value, or of a histogram's sum and buckets."""

    series: int
    added: float
    #: A gauge was set: `added` is its new value.
    absolute: bool = False
    #: Observations of each bucket, the last one for those above all bounds.
    counts: list[int] = []


class MemoryUse(msgspec.Struct, array_like=True, gc=False):
    """The bytes that the instance uses on a device; `kind` is `CPU`, `CPU_PINNED` or `GPU`."""

    kind: str
    device_id: int
    byte_size: int


class StageTimes(msgspec.Struct, array_like=True, gc=False):
    """Times that a backend reports, in order: its stages are input, inference and output, as in `Executed`."""

    start_ns: int
    input_end_ns: int
    output_start_ns: int
    end_ns: int


class RequestReport(msgspec.Struct, array_like=True, gc=False):
    """What a backend reports about a request, instead of what the worker measures around its batch."""

    request: int
    times: StageTimes
    success: bool = True


class BatchReport(msgspec.Struct, array_like=True, gc=False):
    """What a backend reports about an execution of `rows`, instead of the worker's measurement."""

    rows: int
    times: StageTimes


class ResponseReport(msgspec.Struct, array_like=True, gc=False):
    """What a backend reports about a response, by its index among the responses of its request.

    `outcome` is `success`, `fail`, `empty_response` or `cancel`. The inference ends at `output_start_ns`.
    """

    index: int
    outcome: str
    start_ns: int
    output_start_ns: int
    end_ns: int


class Activity(msgspec.Struct, array_like=True, gc=False):
    """A point in the trace of a request; the names of spans end in `_START` and `_END`."""

    request: int
    name: str
    ns: int


# ---- kernel to worker: a model and its instance ---------------------------------------------


class Complete(ToWorker):
    """Complete a model's configuration from its file. The response is `Completed` or `LoadFailed`."""

    #: The incomplete configuration, in protobuf's JSON form with the field names of the .proto file.
    config: str
    #: The model's folder in the repository. `version` names the folder in it.
    model_dir: str
    version: int
    #: Settings of the backend from the command line.
    backend_config: dict[str, str] = {}
    #: Complete nothing, but check that the model's files fit `config`, which is complete (`Backend.verify`).
    verify: bool = False
    #: The `PROTOCOL` of the kernel. A worker with another one refuses the message.
    protocol: str = ""


class AskGpu(ToWorker):
    """Say whether the model's backend can compute on a GPU as it is installed. The response is `GpuObstacle` or
    `LoadFailed`. It has the fields of `Complete`."""

    config: str
    model_dir: str
    version: int
    backend_config: dict[str, str] = {}
    protocol: str = ""


class Load(ToWorker):
    """Load the model. The response is `Loaded` or `LoadFailed`."""

    #: The complete configuration in JSON, as `/config` shows it.
    config: str
    model_dir: str
    version: int
    instance_name: str
    #: `CPU`, `GPU` or `MODEL`, and the device for GPU.
    kind: str = "CPU"
    device_id: int = 0
    #: The most bytes that the worker's large outputs may take at a time.
    arena_byte_size: int = 1 << 34
    verbose: int = 0
    backend_config: dict[str, str] = {}
    #: The CPUs that the worker may use; empty for all.
    cpus: tuple[int, ...] = ()
    #: For GPU: the most pinned bytes of the host that copies of inputs may go through.
    pinned_byte_size: int = 0
    #: For GPU: the memory for gathered inputs and for tensors to other models that is kept, in bytes.
    device_pool_byte_size: int = 0
    #: As in `Complete`.
    protocol: str = ""


class Joined(ToWorker):
    """The loaded instance now belongs to its model. From now on the worker may send `MetricsChanged`."""


class Stop(ToWorker):
    """Finalize the model and exit."""


# ---- kernel to worker: memory ---------------------------------------------------------------


class Attach(Urgent):
    """A region that later messages name by `number`. Sent with its file descriptor.

    A client's region that must not be mapped any more is sent again, with `copied`.
    """

    number: int
    byte_size: int
    offset: int = 0
    #: Whether the worker may write to the region: change inputs in place, or write outputs. A region that is not
    #: writable is mapped privately: the model may change its inputs, and no other process sees the change.
    writable: bool = True
    #: Whether another process may change the bytes while the worker reads them: a client's region.
    volatile: bool = False
    #: Whether the worker copies the bytes, because the client may shorten the region: it must not map it.
    copied: bool = False
    #: For an arena of the kernel, and a worker with a GPU: these first bytes keep their pages, so it may pin them.
    steady_byte_size: int = 0


class AttachDevice(Urgent):
    """Memory of a CUDA device that later messages name by `number`: a client's region, or an arena of another worker.
    The worker opens the handle when it first uses the region, and closes it after `Detach`."""

    number: int
    byte_size: int
    device_id: int
    #: The 64 bytes of a `cudaIpcMemHandle_t`.
    handle: bytes
    #: Whether another worker has allocated it. What the model holds of it is reported (`InputsHeld`).
    of_worker: bool = False


class OwnArena(Urgent):
    """Region `number` is an arena of the worker itself. Sent in place of `Attach` and `AttachDevice`: the worker has
    its memory."""

    number: int
    #: `OUTPUT_ARENA`, or the number of an arena on a device.
    arena: int = OUTPUT_ARENA


class Transfer(Urgent, ToKernel):
    """A region that later messages name by `number`. `Chunk` messages carry its bytes. In both directions."""

    number: int
    byte_size: int


class Chunk(Urgent, ToKernel):
    """Bytes of a region that is being transferred, at most `CHUNK_BYTE_SIZE`. In both directions."""

    number: int
    offset: int
    data: Buffer


class Detach(Urgent):
    """No later message names this region: the worker unmaps it, or frees its copy."""

    number: int


class FreeBlocks(Urgent):
    """These blocks of an arena of the worker are no longer in use."""

    offsets: list[int]
    #: `OUTPUT_ARENA`, or the number of an arena on a device.
    arena: int = OUTPUT_ARENA


# ---- kernel to worker: execution ------------------------------------------------------------


class Execute(ToWorker):
    """Execute these requests together; their inputs are compatible."""

    batch: int
    requests: list[RequestMessage]
    #: How long the worker may poll for the next message after the batch, before it sleeps, in nanoseconds.
    poll_ns: int = 0
    #: Whether the trace of a request has tensors (`TraceContext.tensors`).
    tensors_traced: bool = False


class Cancel(Urgent):
    """The clients of these requests have disconnected: `is_cancelled` is true from now on."""

    requests: list[int]


class Credit(Urgent):
    """The client took `count` more responses of `request`."""

    request: int
    count: int


class Recall(Urgent):
    """Return the batches that are not started: the model waits for another model. The response is `Recalled`. Only with
    a concurrency of 1."""


class EndSequence(ToWorker):
    """The sequence in `slot` has ended: free its implicit state."""

    slot: int


class CheckHealth(ToWorker):
    """Ask the model whether it is healthy. The response is `HealthChecked`, after batches that came before."""

    check: int


class CallResponded(Urgent):
    """A response of a call of another model; see `Submit`. None with `final` only marks the end of the responses.

    Each span of its outputs is leased until the worker names the lease in `Released`. The first span has the lease
    `lease`, the others have the next numbers. Without a lease (0) a span is in a region that was transferred for this
    message and is detached after it.
    """

    call: int
    final: bool
    response: ResponseMessage | None = None
    lease: int = 0


class CallOnHost(Urgent):
    """This call was not sent to its model, because it has inputs on a device, and the model takes none there: the
    worker sends the call again, under another number, with inputs on the host. So it sends all calls of this model,
    until `OnDeviceAgain`."""

    call: int


class OnDeviceAgain(Urgent):
    """A model of which calls came back takes inputs on a device now: another version was loaded."""


class ModelControlled(Urgent):
    """The result of a `ControlModel`: an error, or whether the model is ready."""

    call: int
    ready: bool = False
    error_code: str = ""
    error_text: str = ""


# ---- kernel to helper -----------------------------------------------------------------------


class ReadSpan(ToWorker):
    """Read the bytes of a span of an attached region. The response is `SpanRead`."""

    task: int
    span: Span


class WriteSpan(ToWorker):
    """Write `source`, in an attached arena, to `target`, a span of the same size. The response is `SpanWritten`."""

    task: int
    source: Span
    target: Span


class RunTask(ToWorker):
    """Run a function of the helper. `TaskNeedsMemory`, at most once, and `TaskDone` or `TaskFailed` follow."""

    task: int
    name: str
    arguments: bytes
    #: Bytes inline, or in arenas that were attached.
    sources: list[Tensor]


class TaskMemory(ToWorker):
    """The memory for the result of a task: a span of an arena that was attached for writing. None ends the task."""

    task: int
    span: Span | None = None


class AddMember(ToWorker):
    """A model comes to this process, which may have others, with a connection of its own, over which it says `Hello`.

    Sent only over the connection of a process without a model of its own, with the descriptor of the new connection. A
    process on another host gets an address in place of the descriptor, and opens the connection itself.
    """

    member: int
    title: str
    #: `HOST:PORT`, to which the process connects; "" if the message comes with a descriptor.
    address: str = ""
    #: The first bytes that the process sends over such a connection: they say which member it is for.
    token: bytes = b""


# ---- worker to kernel: a model and its instance ---------------------------------------------


class Hello(StartResponse):
    """The first message of a worker: it is ready to load a model."""

    #: The `PROTOCOL` of the worker. A kernel with another one ends it.
    protocol: str
    pid: int
    #: Whether descriptors can be passed and memory shared with the worker.
    local: bool = True
    #: The worker's monotonic clock at the time of sending, in nanoseconds.
    now_ns: int = 0


class Completed(StartResponse):
    config: str
    #: Whether code of the model has completed it. Then the model is loaded in another process.
    by_model: bool = False


class GpuObstacle(StartResponse):
    #: Why the backend cannot; empty if it can.
    obstacle: str = ""


class Loaded(StartResponse):
    load_ns: int = 0
    #: The concurrency: how many batches the instance executes at the same time.
    concurrency: int = 1
    #: Whether the model has a health check, so that `CheckHealth` may be sent.
    checks_health: bool = False
    #: Whether batches overlap on the instance's GPU: it reads the next one before it has computed the last one.
    overlaps: bool = False


class LoadFailed(StartResponse):
    """The error code's value, and the reason for the operator.

    An interpreter that cannot run a worker sends it in place of `Hello` (`backends/portable/start.py`).
    """

    code: str
    text: str


class Log(ToKernel):
    """A log line of the model: level is `INFO`, `WARNING`, `ERROR` or `VERBOSE`."""

    level: str
    text: str


class MemberEnded(ToKernel):
    """A model of this process has ended: it was asked to, its connection has ended, or `failure` says why."""

    member: int
    failure: str = ""


class MetricsChanged(ToKernel):
    """Changes of the model's custom metrics, applied in the order of the fields. Only after `Joined`."""

    families: list[MetricFamilyRef] = []
    created: list[MetricSeriesRef] = []
    changes: list[MetricChange] = []
    #: Series that the model has dropped.
    removed: list[int] = []


class MemoryUsed(ToKernel):
    """The memory that the instance uses now, on all devices. Only after `Joined`."""

    uses: list[MemoryUse]


class Reported(ToKernel):
    """What the backend reports about executions, at most `MAX_REPORTS` of each kind. Sent before the `Executed` of
    their batch, or before the final response of their request if that is later."""

    #: The batch of `batches`, which is being executed; 0 if there are none.
    batch: int = 0
    requests: list[RequestReport] = []
    batches: list[BatchReport] = []
    responses: list[ResponseReport] = []
    activities: list[Activity] = []


# ---- worker to kernel: memory ---------------------------------------------------------------


class ArenaCreated(ToKernel):
    """The worker's output arena. Sent with a read-only descriptor, before any message names the arena."""

    byte_size: int


class DeviceArenaCreated(ToKernel):
    """Memory of a CUDA device in which the worker leaves tensors for other workers. It stays until the worker ends."""

    #: Below 0, unique for the worker's lifetime.
    arena: int
    byte_size: int
    device_id: int
    #: The 64 bytes of a `cudaIpcMemHandle_t`.
    handle: bytes


class OutboxCreated(ToKernel):
    """The worker's outbox. Sent with its file descriptor, after `Hello`. It also has the number of the batch that the
    worker has begun last (`backends.transport.outbox.Progress`)."""


class InputsHeld(ToKernel):
    """The model still uses inputs of these requests after the final responses, which follow. The inputs are in arenas
    of other processes; their blocks must stay unchanged until `InputsFreed`."""

    requests: list[int]


class InputsFreed(ToKernel):
    """The model no longer uses the held inputs of these requests."""

    requests: list[int]


# ---- worker to kernel: execution ------------------------------------------------------------


class Started(ToKernel):
    """The worker has started to execute a batch. Only with a concurrency above 1."""

    batch: int


class Responded(ToKernel):
    """A response of a request. None with `final` only marks the end of the responses."""

    request: int
    final: bool
    response: ResponseMessage | None = None


class Executed(ToKernel):
    """The batch is finished. `responses` has the final response of each request, in the order of the batch, or is empty
    if they are sent as `Responded`, before or after this.

    The inputs were gathered between `compute_start_ns` and `input_end_ns`, the model itself ran until
    `output_start_ns`, and the outputs were written until `compute_end_ns`.
    """

    batch: int
    responses: list[ResponseMessage] = []
    compute_start_ns: int = 0
    input_end_ns: int = 0
    output_start_ns: int = 0
    compute_end_ns: int = 0
    #: How many tensors the worker copied before and after the model, and their total size in bytes.
    copies: int = 0
    copied_byte_size: int = 0


class HealthChecked(ToKernel):
    """The result of a `CheckHealth`: why the model is not ready, or an empty text."""

    check: int
    problem: str = ""


class Recalled(ToKernel):
    """The batches that the worker returns after `Recall`."""

    batches: list[int]


class Rescheduled(ToKernel):
    """The model wants to execute this request of an unfinished batch again (iterative sequences). No final response
    follows under this number: the kernel sends the request again, under another number."""

    request: int


class TensorsTraced(ToKernel):
    """The inputs or outputs of a request whose trace has tensors. It comes before the response that has them."""

    request: int
    tensors: list[TracedTensor]


# ---- worker to kernel: other models ---------------------------------------------------------


class Submit(ToKernel):
    """Send a request to another model. `call` is larger than in all earlier ones; `CallResponded` names it.

    Inputs may be inline, in the caller's inputs, in results that it leases, or in its own arenas. Outputs have no
    place.
    """

    call: int
    model_name: str
    #: Empty for the newest version that serves.
    model_version: str
    #: Its `number` has no meaning.
    request: RequestMessage
    #: The numbers of the worker's requests for which the model may call; empty if it executes none.
    parents: list[int] = []
    #: Whether the execution of the parents cannot continue before the call has responded. It may not either if this is
    #: false: a thread of the model calls.
    blocking: bool = False
    #: Whether several responses are accepted.
    streaming: bool = False
    #: The number of the worker's request whose trace the model passes on; 0 for none.
    trace_parent: int = 0
    #: Whether the results may be in memory of a device, if the called model leaves them there.
    on_device: bool = False


class CancelCall(ToKernel):
    """The model no longer waits for the responses of this call, which still gets its final one."""

    call: int


class CallConsumed(ToKernel):
    """The model took `count` more responses of a call (credit)."""

    call: int
    count: int


class Released(ToKernel):
    """The model has dropped results: release these leases of `CallResponded`."""

    leases: list[int]


class ControlModel(ToKernel):
    """Load or unload a model, or ask whether it is ready; `action` is `load`, `unload` or `ready`.

    The response is `ModelControlled`. `files` are transferred before, in parts: `ModelFile`.
    """

    call: int
    action: str
    model_name: str
    model_version: str = ""
    #: None for the configuration in the repository.
    config: str | None = None
    unload_dependents: bool = False


class ModelFile(ToKernel):
    """A part of a file for the `ControlModel` with the same `call`, which follows. Parts of a file come in order."""

    call: int
    path: str
    data: bytes


# ---- helper to kernel -----------------------------------------------------------------------


class SpanRead(ToKernel):
    """The bytes of a span, as a tensor inline or in the helper's own arena; or the error text."""

    task: int
    tensor: Tensor | None = None
    error_text: str = ""


class SpanWritten(ToKernel):
    """A span was written; or the error text."""

    task: int
    error_text: str = ""


class TaskNeedsMemory(ToKernel):
    """A task needs memory for its result; `message` is for the front door that started it."""

    task: int
    message: bytes


class TaskDone(ToKernel):
    """A task has ended with `result`, and with `output`, inline or in the helper's own arena, if it has written one."""

    task: int
    result: bytes
    output: Tensor | None = None


class TaskFailed(ToKernel):
    """A task has failed with an error."""

    task: int
    error_code: str
    error_text: str
    #: As in `ResponseMessage`.
    error_before_queueing: bool = False
    #: Whether it is a `kernel.errors.NoMemory`.
    no_memory: bool = False


encoder = msgspec.msgpack.Encoder(enc_hook=encode_lease)
to_worker_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds_of(ToWorker)), dec_hook=decode_lease)
to_kernel_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds_of(ToKernel)), dec_hook=decode_lease)
