"""All messages between the kernel and a front door in a process of its own.

They have the form and the framing of those to workers (`backends/transport/wire.py`). Kernel and door have the same
code: `DoorReady` says which, and the kernel ends a door of another version. Messages of one event-loop iteration leave
in one write.

Who owns what:

- A connection of a client belongs to one process at a time. `Connection` and `Moved` carry its descriptor, and what was
  received and not yet used. The sender has no request of it any more, and closes its own descriptor.
- The socket of `CallsOpened` is the kernel's: over it come calls of one client that the door does not serve.
- The block of a large input belongs to the door, in an arena of the door's own. It stays unchanged from `Infer` until
  `InputsFree` names the request. The kernel has a read-only descriptor of the arena.
- The memory of a large output belongs to its worker, or is an input of the request. It stays unchanged from `Inferred`
  until `ResponsesSent` names its `lease`.
- A request belongs to the kernel from `Infer` on. It gets exactly one `Inferred` that is final, also after
  `CancelInfer`.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import msgspec

from backends.transport.wire import (
    SEQUENCE_END,
    SEQUENCE_START,
    Message,
    ParameterValue,
    RequestMessage,
    encoder,
    kinds_of,
)
from shm.tensor import RequestedOutput, Tensor, decode_lease

if TYPE_CHECKING:
    from kernel.serving.request import Request

#: The most models of which a door knows the signature. A door that needs more begins anew.
MOST_ROUTES = 1024

#: The most forms that a door numbers. Then it begins anew, with `FormsForgotten`.
MOST_FORMS = 4096

#: The most bytes that these have together, see `form_byte_size`. At more it begins anew, too.
MOST_FORMS_BYTE_SIZE = 256 << 20

#: How long the release of memory may wait for a message that wakes the other process anyway, in seconds.
RELEASE_S = 0.002


class ToDoor(Message):
    """Base of messages from the kernel."""


class FromDoor(Message):
    """Base of messages from a door."""


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span of an arena of the door."""

    arena: int
    offset: int
    byte_size: int


class Form(msgspec.Struct, array_like=True, omit_defaults=True):
    """What requests have in common that differ in their id and the bytes of their tensors."""

    model_name: str
    #: As the client gave it; empty for the newest.
    model_version: str
    #: The inputs have no bytes; those in a client's region name it.
    request: RequestMessage
    #: The name of the call in errors.
    entry_point: str
    #: The headers of the requests, as they were sent, without the length of the body.
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: Whether the client wants to know how the request travels.
    explain: bool = False
    #: Whether the call can carry more than one response.
    streaming: bool = False
    #: Whether the request came over gRPC, and not over HTTP.
    grpc: bool = False


def form_byte_size(form: Form) -> int:
    """Return how many bytes a form has, encoded."""
    return len(encoder.encode(form))


def form_of(request: Request) -> Form:
    """Return what `request` has in common with others."""
    flags = SEQUENCE_START * request.sequence_start | SEQUENCE_END * request.sequence_end
    inputs = [Tensor(each.name, each.datatype, each.shape, None, None, each.client_span) for each in request.inputs]
    outputs = [RequestedOutput(each.name, each.classification, None, each.client_span) for each in request.outputs]
    wanted = RequestMessage(
        0, inputs, outputs, "", flags, request.correlation_id, request.priority, request.timeout_us, request.parameters
    )
    head = head_of(request.sink)
    return Form(
        request.model_name, request.model_version, wanted, request.entry_point, headers_of(head), request.explain,
        request.streaming, hasattr(head, "fields"),
    )  # fmt: skip


def head_of(sink: Any) -> Any:
    """Return the head of a request: of HTTP or of gRPC."""
    head = getattr(sink, "head", None)
    return getattr(sink, "request_head", None) if head is None else head


#: Headers that differ from request to request, and that nothing asks for.
_NOT_SENT = frozenset({b"content-length", b"grpc-timeout"})


def headers_of(head: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a request without those of `_NOT_SENT`."""
    if head is None:
        return ()
    fields = getattr(head, "fields", None)  # of gRPC, as text
    if fields is None:
        return tuple(each for each in head.headers if each[0].lower() not in _NOT_SENT)
    sent = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in fields)
    return tuple(each for each in sent if each[0] not in _NOT_SENT and not each[0].startswith(b":"))


class RouteText(msgspec.Struct, array_like=True):
    """A model that clients reach by this name and version."""

    name: str
    version: str
    #: The `kernel.config.spec.ModelSpec` in msgpack; empty if the kernel itself serves its requests.
    spec: bytes


class ErrorText(msgspec.Struct, array_like=True, omit_defaults=True):
    """An error, as clients see it."""

    code: str
    text: str
    #: The name of its class, where that decides more than the code.
    kind: str = ""
    before_queueing: bool = False
    max_byte_size: int = 0
    retry_later: bool = False


# ---- kernel to door --------------------------------------------------------------------------


class Configure(ToDoor):
    """The first message: what the door is to be."""

    #: The limit of each arena.
    arena_byte_size: int
    #: Whether regions belong to the peers that have registered them.
    owned_regions: bool
    max_decompression_ratio: int
    log_verbose_level: int
    #: How many bytes of tensors the door may have at first.
    granted_byte_size: int


class ProtocolOpened(ToDoor):
    """The door serves connections of one protocol more."""

    name: str
    #: The module of the protocol, and its settings in a form of its own.
    module: str
    settings: bytes


class RoutesChanged(ToDoor):
    """What these routes are now. One that a door wants to know, and that only the kernel serves, has no spec."""

    routes: list[RouteText]


class Connection(ToDoor):
    """A connection of a client, with its descriptor."""

    #: The name of its protocol.
    protocol: str
    #: What has come and belongs to no message that was begun.
    received: bytes
    #: How often the kernel has given it to a door, this time included.
    passes: int


class Inferred(ToDoor):
    """A response of a request."""

    request: int
    final: bool
    #: None for a response that only marks the end, and for an error.
    outputs: list[Tensor] | None = None
    parameters: dict[str, ParameterValue] | None = None
    model_version: str = ""
    #: Empty if it is that of the request.
    model_name: str = ""
    #: The number that `ResponsesSent` names; 0 if no output has a span. A region below 0 is an arena of the door.
    lease: int = 0
    error: ErrorText | None = None
    refused: bool = False
    #: Whether it is an error that was found while the request was submitted.
    at_once: bool = False


class InputsFree(ToDoor):
    """The inputs of these requests in arenas of the door are no longer used."""

    requests: list[int]


class RegionAdded(ToDoor):
    """Memory that later responses name, with a read-only descriptor."""

    number: int
    byte_size: int


class RegionRemoved(ToDoor):
    """No response names this memory any more, and none is leased."""

    number: int


class Granted(ToDoor):
    """The door may have as many more bytes of tensors; 0: there are none now."""

    byte_size: int


class LogVerbose(ToDoor):
    """The verbose level of the log has changed."""

    level: int


class Drain(ToDoor):
    """Close idle connections, others when their requests have responses or after this time, and end."""

    grace_s: float


class Ping(ToDoor):
    """Respond with `Pong`: a door that does not hangs."""


# ---- door to kernel --------------------------------------------------------------------------


class DoorReady(FromDoor):
    """The door can take connections. The first message."""

    protocol: str


class WantRoute(FromDoor):
    """Say with `RoutesChanged` what this route is, now and after each change."""

    name: str
    version: str


class FormAdded(FromDoor):
    """Later messages name this form by its number, which is larger than all before."""

    number: int
    form: Form


class FormsForgotten(FromDoor):
    """No later message names a form from before."""


class Infer(FromDoor):
    """Execute a request. `number` is larger than in all earlier ones."""

    number: int
    form: int
    #: The bytes of each input, or where they are; None for one in a client's region.
    data: list[bytes | Place | None]
    id: str = ""
    #: When the client gives up, in monotonic nanoseconds; 0 if that is not known.
    deadline_ns: int = 0


class InferOnce(FromDoor):
    """As `Infer`, for a request whose form is used once."""

    number: int
    form: Form
    data: list[bytes | Place | None]
    id: str = ""
    #: Who the client is, if regions have owners and the request names one; else empty.
    peer: str = ""
    #: As in `Infer`.
    deadline_ns: int = 0


class CancelInfer(FromDoor):
    """The clients of these requests have left."""

    requests: list[int]


class ResponsesTaken(FromDoor):
    """The client of a request has taken as many more responses that are not final."""

    request: int
    count: int


class ResponsesSent(FromDoor):
    """The outputs of these responses are no longer used."""

    leases: list[int]


class ArenaAdded(FromDoor):
    """An arena for inputs of a model, with a read-only descriptor."""

    number: int
    model_name: str
    byte_size: int


class ArenaRemoved(FromDoor):
    """No later request has inputs in this arena."""

    number: int


class WantMemory(FromDoor):
    """The door needs as many more bytes for tensors. `Granted` follows."""

    byte_size: int


class MemoryReturned(FromDoor):
    """The door has no more use for as many of the bytes that were granted to it."""

    byte_size: int


class Moved(FromDoor):
    """A connection of a client with a message that the kernel serves itself, with its descriptor."""

    received: bytes
    passes: int


class CallsOpened(FromDoor):
    """A socket, with its descriptor, over which come calls of one client that only the kernel serves, as HTTP/2."""

    #: The address of the client as its socket has it; empty for a Unix socket.
    address: list[str | int]
    #: Who the client is (`protocols.access.peer_identity`).
    identity: str


class DoorState(FromDoor):
    """What the door counts, by the name of the protocol."""

    connections: dict[str, int]
    #: How many it has got from the kernel.
    taken: dict[str, int]
    memory_refusals: int


class DoorLogged(FromDoor):
    """A line of the log."""

    name: str
    level: int
    text: str
    #: What the line of an access consists of (`kernel.observe.access_log.Access`).
    fields: dict[str, str | int | float | None] = {}


class Pong(FromDoor):
    """The response to `Ping`."""


to_door_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds_of(ToDoor)), dec_hook=decode_lease)
from_door_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds_of(FromDoor)), dec_hook=decode_lease)
