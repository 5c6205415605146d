"""Every message between the kernel and a worker process. This file is the whole protocol.

A message is msgpack, an array whose first element is the tag; `backends/transport/framing.py` puts its length
in front. Kernel and worker are of the same version, so there is no negotiation beyond `Hello`.

    kernel → worker   Complete, Load, Joined, Execute, Cancel, Credit, FreeBlocks, Stop    Attach*, Detach*
    worker → kernel   Hello, Completed, Loaded, LoadFailed, Responded, Executed, Log,      ArenaCreated*, OutboxCreated*
                      InputsHeld, InputsFreed, MetricsChanged

Messages with * work only on one machine: `Attach`, `ArenaCreated` and `OutboxCreated` travel together with a
file descriptor. Without them tensors go inline, so that a worker on another host can speak the rest.

Order: a worker answers `Execute` messages in the order it got them, with any number of `Responded`
and one `Executed`, and starts no batch before the `Executed` of the one before is on its way, or in
its outbox (`backends/transport/outbox.py`). So the kernel knows what a worker that dies had not started. A
decoupled model may respond after `Executed`.
"""

from __future__ import annotations

import msgspec

#: Raised when either side changes; a worker of another number is refused.
PROTOCOL = 4

#: The number by which a worker and the kernel name the worker's own output arena.
OUTPUT_ARENA = 0

#: How many responses of one request a worker may have sent beyond those that the client took.
CREDIT_WINDOW = 64


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all messages."""


class TensorRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A tensor: `data` inline, or `byte_size` bytes at `offset` of the region numbered `region`.

    `shape` includes the batch dimension. Offsets count from the start of what `Attach` described.
    """

    name: str
    datatype: str
    shape: list[int]
    data: bytes | None = None
    region: int = -1
    offset: int = 0
    byte_size: int = 0
    #: The bytes are memory of a client: a worker never writes to its inputs there.
    foreign: bool = False


class OutputRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An output that the client asked for: best classes, a place in its region, or neither."""

    name: str
    classification: int = 0
    region: int = -1
    offset: int = 0
    byte_size: int = 0


class RequestRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request of a batch. `number` is unique for the worker's lifetime."""

    number: int
    inputs: list[TensorRef]
    outputs: list[OutputRef] = []
    id: str = ""
    #: 1: start of a sequence, 2: end of a sequence (TRITONSERVER_REQUEST_FLAG_*).
    flags: int = 0
    correlation_id: int | str = 0
    priority: int = 0
    timeout_us: int = 0
    parameters: dict[str, str | int | bool | float] = {}


class ResponseRef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One response. With `error_code` set there are no outputs. Blocks of the output arena that
    `outputs` name belong to the kernel until it sends `FreeBlocks`. A final response may name a
    place within an input of its request in the kernel's arena, which nobody else uses any more."""

    outputs: list[TensorRef] = []
    parameters: dict[str, str | int | bool | float] = {}
    error_code: str = ""
    error_text: str = ""


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


# ---- kernel to worker -----------------------------------------------------------------------


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


class Attach(Message):
    """A region that later messages name by `number`; its file descriptor comes along."""

    number: int
    byte_size: int
    offset: int = 0
    #: Whether the region is a client's; otherwise it is an arena of the kernel.
    foreign: bool = False


class Detach(Message):
    """No later message names this region: unmap it."""

    number: int


class Execute(Message):
    """Execute these requests together; their inputs are compatible."""

    batch: int
    requests: list[RequestRef]
    #: For how many nanoseconds the worker may poll for the next message when it is done, before it sleeps.
    poll_ns: int = 0


class Cancel(Message):
    """The clients of these requests are gone: `is_cancelled` is true from now on."""

    requests: list[int]


class Credit(Message):
    """The client took `count` more responses of `request`."""

    request: int
    count: int


class FreeBlocks(Message):
    """The kernel has done with these blocks of the output arena."""

    offsets: list[int]


class Stop(Message):
    """Finalize the model and exit."""


# ---- worker to kernel -----------------------------------------------------------------------


class Hello(Message):
    """First message of a worker: it runs and can be given a model."""

    protocol: int
    pid: int


class Completed(Message):
    config: str


class Loaded(Message):
    load_ns: int = 0


class LoadFailed(Message):
    """The reason, as an operator should read it, and the error code's value."""

    code: str
    text: str


class ArenaCreated(Message):
    """The worker's output arena; its file descriptor comes along. Sent before `Loaded`."""

    byte_size: int


class OutboxCreated(Message):
    """The memory of what the worker has said and not sent; its file descriptor comes along. Sent after `Hello`."""


class Responded(Message):
    """A response of one request. None with `final` only says that no more will come."""

    request: int
    final: bool
    response: ResponseRef | None = None


class Executed(Message):
    """The batch is done and the worker idle. `responses` is the final response of each request of
    the batch in order, or empty where they were or will be sent as `Responded`.

    Durations are those of gathering the inputs, of the model itself and of writing the outputs.
    """

    batch: int
    responses: list[ResponseRef] = []
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class InputsHeld(Message):
    """The model goes on using inputs of these requests in the kernel's arena, whose final answers follow: their
    blocks stay as they are until `InputsFreed`."""

    requests: list[int]


class InputsFreed(Message):
    """The model has done with inputs that it held."""

    requests: list[int]


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


ToWorker = Complete | Load | Joined | Attach | Detach | Execute | Cancel | Credit | FreeBlocks | Stop
ToKernel = (
    Hello
    | Completed
    | Loaded
    | LoadFailed
    | ArenaCreated
    | OutboxCreated
    | Responded
    | Executed
    | InputsHeld
    | InputsFreed
    | Log
    | MetricsChanged
)

encoder = msgspec.msgpack.Encoder()
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
to_kernel_decoder = msgspec.msgpack.Decoder(ToKernel)
