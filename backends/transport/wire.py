"""Every message between the kernel and a worker process. This file is the whole protocol, so it is a long one.

A message is msgpack, an array whose first element is the tag; `backends/transport/framing.py` puts its length in front.
Kernel and worker are of the same version, so there is no negotiation beyond `Hello`.

    kernel → worker   Complete, Load, Joined, Execute, Cancel, Credit, FreeBlocks, Stop
                      Attach*, OwnArena*, Detach, Transfer, Chunk
                      ReadSpan, WriteSpan                                          (helpers)
                      Recall, EndSequence, CallResponded, ModelControlled          (see "What comes next")
    worker → kernel   Hello, Completed, Loaded, LoadFailed, Responded, Executed, Log
                      ArenaCreated*, OutboxCreated*, InputsHeld, InputsFreed, MetricsChanged, Transfer, Chunk
                      SpanRead, SpanWritten                                        (helpers)
                      Started, Recalled, Rescheduled, MemoryUsed
                      Submit, CancelCall, Released, Blocked, ControlModel          (see "What comes next")

Sessions. Messages with * work only between processes of one machine: `Attach`, `ArenaCreated` and `OutboxCreated`
travel together with a file descriptor. `Hello.local` says whether a session has them. In one that does not, each side
gives the other copies: `Transfer` announces a region, `Chunk` messages bring its bytes, and tensors name spans of it as
they name spans of attached regions. `Detach` ends both kinds; the kernel frees a region that a worker transferred.

Places. A tensor lies inline, or in a span whose region travels as its number (`shm.tensor.encode_lease`). The kernel's
regions have numbers above 0. `OUTPUT_ARENA` is the worker's own arena, in both directions.

Order. With a concurrency of 1 a worker responds to `Execute` messages in the order in which it got them, with any
number of `Responded` and one `Executed`, and starts no batch before the `Executed` of the one before is sent or kept in
its outbox (`backends/transport/outbox.py`). So the kernel knows what a worker that dies had not started. With a higher
concurrency the worker sends `Started` for each batch, and `Executed` may come in any order. A decoupled model may
respond after `Executed`.

Times are monotonic nanoseconds of the worker's clock. On one machine that is the kernel's clock; otherwise the session
adds the difference that `Hello.now_ns` shows.

What comes next has its place here, so that the protocol is not rebuilt for it: sequences (`SequenceEntry`,
`EndSequence`), iterative sequences (`Rescheduled`), several batches at a time (`Started`, `Recall`),
calls of other models (`Submit` to `Blocked`), model control, traces (`RequestMessage.trace`), memory usage. A kernel or
worker that gets one of these without having asked for it treats it as a broken peer.
"""

from __future__ import annotations

import msgspec

from shm.tensor import Buffer, RequestedOutput, Span, Tensor, decode_lease, encode_lease

#: Raised when either side changes; a worker of another number is refused.
PROTOCOL = 5

#: The number by which a worker and the kernel name the worker's own output arena.
OUTPUT_ARENA = 0

#: How many responses of one request a worker may have sent beyond those that the client took.
CREDIT_WINDOW = 64

#: The most bytes in one `Chunk`: other messages are sent between two of them.
CHUNK_BYTE_SIZE = 256 << 10

#: Regions that a worker transfers have numbers from here on, so that they never meet the kernel's.
FIRST_TRANSFER_OF_WORKER = 1 << 62

#: `RequestMessage.flags` (TRITONSERVER_REQUEST_FLAG_*).
SEQUENCE_START, SEQUENCE_END = 1, 2

ParameterValue = str | int | bool | float


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all messages."""


class TraceContext(msgspec.Struct, array_like=True, gc=False):
    """The trace that a request belongs to: its id, that of the parent, and the client's W3C trace context."""

    id: int
    parent_id: int = 0
    traceparent: str = ""


class SequenceEntry(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The place of a request in a batch of sequences."""

    #: By which the worker keeps implicit state.
    slot: int
    #: Control tensors, which the model gets beside the inputs.
    controls: list[Tensor] = []
    #: Padding of the batch: there is no request, and no response is expected.
    empty: bool = False


class RequestMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request of a batch, or of a call of another model. `number` is unique for the worker's lifetime."""

    number: int
    inputs: list[Tensor]
    #: Destinations of outputs; none for all outputs in the response. See `RequestedOutput`.
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

    A block of the output arena that `outputs` name belongs to the kernel until it sends `FreeBlocks`. A final response
    may name a span within an input of its request, in an arena of the kernel. A span of a client's region says that the
    output was written there.
    """

    outputs: list[Tensor] = []
    parameters: dict[str, ParameterValue] = {}
    error_code: str = ""
    error_text: str = ""
    #: Whether Triton finds the error before it queues the request (`ServingError.before_queueing`).
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
    #: Upper bounds of a histogram's buckets, ascending, without the infinite one.
    buckets: list[float] = []


class MetricChange(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What was added to a series since its last change: to the value, or to a histogram's sum and buckets."""

    series: int
    added: float
    #: A gauge was set: `added` is its value.
    absolute: bool = False
    #: Observations by bucket, and above all bounds.
    counts: list[int] = []


class MemoryUse(msgspec.Struct, array_like=True, gc=False):
    """How many bytes the instance uses on a device; `kind` is `CPU`, `CPU_PINNED` or `GPU`."""

    kind: str
    device_id: int
    byte_size: int


# ---- kernel to worker: a model and its instance ---------------------------------------------


class Complete(Message):
    """Complete a model's configuration from its file, and answer `Completed` or `LoadFailed`."""

    #: The configuration as far as it is known, in protobuf's JSON form with field names as in the .proto.
    config: str
    #: The model's folder in the repository, and the version folder in it.
    model_dir: str
    version: int
    #: Settings of the backend from the command line.
    backend_config: dict[str, str] = {}


class Load(Message):
    """Load the model and answer `Loaded` or `LoadFailed`."""

    #: The complete configuration in JSON, as `/config` shows it.
    config: str
    model_dir: str
    version: int
    instance_name: str
    #: `CPU`, `GPU` or `MODEL`, and the device for GPU.
    kind: str = "CPU"
    device_id: int = 0
    #: Largest number of bytes that the worker's output arena may take.
    arena_byte_size: int = 1 << 34
    verbose: int = 0
    backend_config: dict[str, str] = {}
    #: The CPUs that the worker may use; none for all.
    cpus: tuple[int, ...] = ()


class Joined(Message):
    """The instance that was loaded belongs to its model now: `MetricsChanged` may come."""


class Stop(Message):
    """Finalize the model and exit."""


# ---- kernel to worker: memory ---------------------------------------------------------------


class Attach(Message):
    """A region that later messages name by `number`; its file descriptor comes along."""

    number: int
    byte_size: int
    offset: int = 0
    #: Whether the worker may write to the region: to its inputs in place, or outputs. A region that is not writable is
    #: mapped privately: the model may change its inputs, and no other process sees it.
    writable: bool = True
    #: Whether another process may change the bytes while the worker reads them: a client's region.
    volatile: bool = False


class OwnArena(Message):
    """Region `number` is the worker's own output arena: spans of it are used in the worker's own mapping."""

    number: int


class Transfer(Message):
    """A region that later messages name by `number`. `Chunk` messages bring its bytes. In both directions."""

    number: int
    byte_size: int


class Chunk(Message):
    """Bytes of a region that is being transferred, at most `CHUNK_BYTE_SIZE`. In both directions."""

    number: int
    offset: int
    data: Buffer


class Detach(Message):
    """No later message names this region: unmap it, or free its copy."""

    number: int


class FreeBlocks(Message):
    """Nobody uses these blocks of the worker's output arena any more."""

    offsets: list[int]


# ---- kernel to worker: execution ------------------------------------------------------------


class Execute(Message):
    """Execute these requests together; their inputs are compatible."""

    batch: int
    requests: list[RequestMessage]
    #: For how many nanoseconds the worker may poll for the next message when it is done, before it sleeps.
    poll_ns: int = 0


class Cancel(Message):
    """The clients of these requests are gone: `is_cancelled` is true from now on."""

    requests: list[int]


class Credit(Message):
    """The client took `count` more responses of `request`."""

    request: int
    count: int


class Recall(Message):
    """Give back the batches that are not started, and answer `Recalled`: the instance waits for another model."""


class EndSequence(Message):
    """The sequence in `slot` has ended: free its implicit state."""

    slot: int


class CallResponded(Message):
    """A response of a call of another model; see `Submit`. Its spans are leased until the worker names `lease` in
    `Released`, 0 where the response has no spans."""

    call: int
    final: bool
    response: ResponseMessage | None = None
    lease: int = 0


class ModelControlled(Message):
    """What became of a `ControlModel`: an error, or whether the model is ready."""

    call: int
    ready: bool = False
    error_code: str = ""
    error_text: str = ""


# ---- kernel to helper -----------------------------------------------------------------------


class ReadSpan(Message):
    """Read the bytes of a span of an attached region and answer `SpanRead`."""

    task: int
    span: Span


class WriteSpan(Message):
    """Write `source`, a span of an attached arena, to `target`, a span of as many bytes, and answer `SpanWritten`."""

    task: int
    source: Span
    target: Span


# ---- worker to kernel: a model and its instance ---------------------------------------------


class Hello(Message):
    """First message of a worker: it runs and can be given a model."""

    protocol: int
    pid: int
    #: Whether descriptors can be passed and memory shared with the worker.
    local: bool = True
    #: The worker's monotonic clock when it sent this.
    now_ns: int = 0


class Completed(Message):
    config: str


class Loaded(Message):
    load_ns: int = 0
    #: How many batches the instance executes at the same time.
    concurrency: int = 1


class LoadFailed(Message):
    """The reason, as an operator should read it, and the error code's value."""

    code: str
    text: str


class Log(Message):
    """A line that the model logged through its backend: level is `INFO`, `WARNING`, `ERROR` or `VERBOSE`."""

    level: str
    text: str


class MetricsChanged(Message):
    """What became of the model's own metrics, in this order. Only after `Joined`."""

    families: list[MetricFamilyRef] = []
    created: list[MetricSeriesRef] = []
    changes: list[MetricChange] = []
    #: Series that the model has dropped.
    removed: list[int] = []


class MemoryUsed(Message):
    """What the instance uses now, on all devices."""

    uses: list[MemoryUse]


# ---- worker to kernel: memory ---------------------------------------------------------------


class ArenaCreated(Message):
    """The worker's output arena; a descriptor that is open for reading comes along. Sent before it is first named."""

    byte_size: int


class OutboxCreated(Message):
    """The memory of messages that the worker keeps unsent; its file descriptor comes along. Sent after `Hello`."""


class InputsHeld(Message):
    """The model goes on using inputs of these requests in arenas of other processes, and the final responses follow:
    the blocks stay as they are until `InputsFreed`."""

    requests: list[int]


class InputsFreed(Message):
    """The model has done with inputs that it held."""

    requests: list[int]


# ---- worker to kernel: execution ------------------------------------------------------------


class Started(Message):
    """The worker has begun to execute a batch. Only where the concurrency is above 1."""

    batch: int


class Responded(Message):
    """A response of one request. None with `final` only says that no more will come."""

    request: int
    final: bool
    response: ResponseMessage | None = None


class Executed(Message):
    """The batch is done. `responses` is the final response of each request of the batch in order, or empty where they
    were or will be sent as `Responded`.

    The inputs were gathered between `compute_start_ns` and `input_end_ns`, the model itself ran until
    `output_start_ns`, and the outputs were written until `compute_end_ns`.
    """

    batch: int
    responses: list[ResponseMessage] = []
    compute_start_ns: int = 0
    input_end_ns: int = 0
    output_start_ns: int = 0
    compute_end_ns: int = 0
    #: How many tensors the worker copied around the model, and how many bytes these were.
    copies: int = 0
    copied_byte_size: int = 0


class Recalled(Message):
    """The batches that the worker gives back, as it was asked to by `Recall`."""

    batches: list[int]


class Rescheduled(Message):
    """The model wants this request to be executed again, with these inputs (iterative sequences)."""

    request: int
    inputs: list[Tensor]


# ---- worker to kernel: other models ---------------------------------------------------------


class Submit(Message):
    """Send a request to another model. `call` is unique for the worker's lifetime; `CallResponded` names it.

    Inputs may lie inline, in the caller's inputs, in results that it leases, and in its own arena.
    """

    call: int
    model_name: str
    model_version: str
    request: RequestMessage
    #: The request of this worker on whose behalf the model calls.
    parent: int
    #: Whether several responses are accepted.
    streaming: bool = False


class CancelCall(Message):
    """Nobody waits for the responses of this call any more."""

    call: int


class Released(Message):
    """The model has dropped results: these leases of `CallResponded` end."""

    leases: list[int]


class Blocked(Message):
    """The instance waits for a call (`waiting`), or goes on."""

    call: int
    waiting: bool


class ControlModel(Message):
    """Load or unload a model, or ask whether it is ready; `action` is `load`, `unload` or `ready`."""

    call: int
    action: str
    model_name: str
    model_version: str = ""
    config: str = ""
    files: dict[str, bytes] = {}
    unload_dependents: bool = False


# ---- helper to kernel -----------------------------------------------------------------------


class SpanRead(Message):
    """The bytes of a span, as a tensor inline or in the helper's own arena; or why they cannot be read."""

    task: int
    tensor: Tensor | None = None
    error_text: str = ""


class SpanWritten(Message):
    """A span was written, or why it cannot be."""

    task: int
    error_text: str = ""


ToWorker = (
    Complete
    | Load
    | Joined
    | Stop
    | Attach
    | OwnArena
    | Transfer
    | Chunk
    | Detach
    | FreeBlocks
    | Execute
    | Cancel
    | Credit
    | Recall
    | EndSequence
    | CallResponded
    | ModelControlled
    | ReadSpan
    | WriteSpan
)
ToKernel = (
    Hello
    | Completed
    | Loaded
    | LoadFailed
    | Log
    | MetricsChanged
    | MemoryUsed
    | ArenaCreated
    | OutboxCreated
    | InputsHeld
    | InputsFreed
    | Transfer
    | Chunk
    | Started
    | Responded
    | Executed
    | Recalled
    | Rescheduled
    | Submit
    | CancelCall
    | Released
    | Blocked
    | ControlModel
    | SpanRead
    | SpanWritten
)

encoder = msgspec.msgpack.Encoder(enc_hook=encode_lease)
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_lease)
to_kernel_decoder = msgspec.msgpack.Decoder(ToKernel, dec_hook=decode_lease)
