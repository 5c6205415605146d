"""What front doors see of the server: an interface, so that a front door may be in a process of its own.

`Kernel` is this interface for front doors in its process. A front door in a process of its own has another object,
which keeps a copy of what it needs to decide and sends messages for the rest.

Whether a call may wait:

- Requests, routes and memory never wait. What is refused later is a response to the sink of the request.
- What is read (settings, the state of the server, figures) never waits in the kernel's process. From another process
  the state and the settings are copies that the kernel pushes; figures have to be asked for.
- Administration (the repository, regions of clients, settings of traces and logs) may wait: calls that are `async` here
  do so in the kernel's process, too. Nothing of an inference request waits for administration.

First the interface, then what it hands out: settings, control of the repository and of traffic, figures of the cache.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from kernel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kernel.memory.client_regions import RegionRegistry
    from kernel.memory.input_placement import MemoryRefusals, ReceiveBuffer
    from kernel.observe.gpu_figures import GpuFigureReader
    from kernel.observe.recent import Recent
    from kernel.serving.catalog import IndexItem
    from kernel.serving.helper_tasks import FrontDoorHelpers, Helpers
    from kernel.serving.model_figures import InstanceFigures, ModelCounters, ModelFigures
    from kernel.serving.prepared import PreparedRequest
    from kernel.serving.request import Request
    from kernel.serving.route import ModelRoute
    from kernel.settings import LogSettings, TraceSettings
    from shm.arena import Block
    from shm.blocks import ByteBudget
    from shm.tensor import RequestedOutput, Tensor

_Figures = TypeVar("_Figures")


class CatalogView(Protocol):
    """The models, as the front door knows them. Nothing here waits."""

    #: Grows with every change of the models: what was prepared before may no longer be right. An attribute, because
    #: every request reads it.
    generation: int

    def ready_names(self) -> Collection[str]:
        """Return the names of the models that clients reach without a version, in no order."""

    def has_label(self, name: str, label: str) -> bool:
        """Whether `label` is one of a model's labels, which stand for versions."""

    def number_of(self, name: str, version: str) -> int:
        """Return the number of the version that a number or a label means. Raises `ServingError`."""

    def all_ready(self) -> bool:
        """Whether every version that should be loaded is READY and has a living instance."""

    def identifiers(self) -> list[str]:
        """Return the identifiers of all models that the index lists, in their order."""

    def index_of(self, identifier: str, ready: bool = False) -> list[IndexItem]:
        """Return the lines of the repository index about one model."""

    def wanted(self) -> list[IndexItem]:
        """Return the lines of the index about versions that serve, or that should and do not."""


class KernelInterface(Protocol):
    """The server, for front doors."""

    @property
    def catalog(self) -> CatalogView: ...

    # ---- requests: nothing waits -----------------------------------------------------------------

    @property
    def helpers(self) -> FrontDoorHelpers: ...

    @property
    def text_helpers(self) -> Helpers:
        """Helpers that render chat templates and tokenize: what models bring may hang or end them."""

    @property
    def takes_times(self) -> bool:
        """Whether front doors note when requests come, because one of the next may be traced."""

    @property
    def cancel(self) -> Callable[..., None]:
        """Cancels the requests that it is given, whose client has left. Each still gets its final response."""

    def route(self, name: str, version: str = "") -> ModelRoute:
        """Return the route of a call that takes any number of responses. Raises `ServingError`."""

    def unary_route(self, name: str, version: str, entry_point: str) -> ModelRoute:
        """As `route`, for a call named `entry_point` with one response. Raises `DecoupledOverUnary`, too."""

    def submit(
        self,
        request: Request,
        prepared: PreparedRequest | None = None,
        received_in: ReceiveBuffer | None = None,
        route: ModelRoute | None = None,
        *,
        admitted: bool = False,
    ) -> None:
        """Check and queue `request`, see `Kernel.submit`. Never raises: a refusal is a response to its sink."""

    def begin_preparing(self, request: Request, byte_size: int) -> None:
        """Admit a request that is submitted later, and count `byte_size` bytes. Raises `ServingError`."""

    def end_preparing(self, byte_size: int) -> None:
        """A request that `begin_preparing` has admitted was submitted or refused."""

    def check_shapes(self, request: Request, route: ModelRoute) -> None:
        """Check a request whose tensors have a place, but perhaps no bytes yet. Raises `ServingError`."""

    # ---- memory: nothing waits -------------------------------------------------------------------

    @property
    def budget(self) -> ByteBudget: ...

    @property
    def memory_refusals(self) -> MemoryRefusals: ...

    def receive_buffer(self, route: ModelRoute, byte_size: int, first_tensor: int) -> ReceiveBuffer | None:
        """Return memory in which to receive a body, that the models of `route` can read; None if there is no room.

        The tensors begin at `first_tensor` of the body.
        """

    def message_buffer(self, byte_size: int) -> ReceiveBuffer:
        """Return a buffer in which to receive a message that a helper decodes. Raises `ArenaFull`."""

    def memory_for(self, route: ModelRoute, byte_size: int) -> Block:
        """Return a block that workers of `route` can read; the caller releases it. Raises `ArenaFull`."""

    def memory_for_helper(self, byte_size: int) -> Block:
        """Return a block that only helpers read; the caller releases it. Raises `ArenaFull`."""

    # ---- the state of the server: nothing waits in the kernel's process --------------------------

    @property
    def settings(self) -> KernelSettings: ...

    @property
    def identity(self) -> ServerIdentity: ...

    @property
    def starting(self) -> bool: ...

    @property
    def start_failed(self) -> bool: ...

    @property
    def stopping(self) -> bool: ...

    def live(self) -> bool:
        """Whether the server has started. Raises `Unavailable` while it stops."""

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model version can execute now. Raises `ServingError`."""

    async def server_is_ready(self) -> bool:
        """Whether the server accepts requests; models may be asked. Raises `Unavailable` while it stops."""

    async def model_is_ready(self, name: str, version: str = "") -> bool:
        """As `model_ready`; the model itself may be asked."""

    # ---- figures: read when they are asked for ---------------------------------------------------

    def figures(self, name: str = "") -> list[ModelFigures]:
        """Return the figures of the READY versions of all models, or of those called `name`, in order."""

    def counters(self) -> Sequence[ModelCounters]:
        """Return the counters of all versions that can have requests."""

    @property
    def queued(self) -> int:
        """How many requests wait for an execution."""

    def served_figures(self, name: str, version: str = "") -> ModelFigures:
        """Return the figures of a version that serves. Raises `ServingError`."""

    def loaded_figures(self, identifier: str, version: int) -> ModelFigures | None:
        """Return the figures of a version by its model's identifier; None if it is not loaded."""

    def instance_figures(self, identifier: str, version: int) -> list[InstanceFigures]:
        """Return the figures of the instances of a version; none if it is not loaded."""

    def part_figures(self, kind: type[_Figures]) -> list[_Figures]:
        """Return the figures of this kind, of each part of the server that has such, in the order of the parts.

        `kernel.server_parts` has most kinds.
        """

    @property
    def gpu_figures(self) -> GpuFigureReader | None: ...

    @property
    def lost_log_lines(self) -> Callable[[], int]: ...

    # ---- administration --------------------------------------------------------------------------

    @property
    def repository(self) -> RepositoryControl: ...

    @property
    def traffic(self) -> TrafficControl | None: ...

    @property
    def regions(self) -> RegionRegistry: ...

    def clear_poison(self, name: str, version: str = "") -> int:
        """Forget the requests that are refused because equal ones have ended workers; returns how many these were.

        Raises `ServingError`, also for a model that remembers none.
        """

    def check_client_shm(self, *, local_peer: bool) -> None:
        """Raise `ClientSharedMemoryDisabled` unless this client may register shared memory."""

    @property
    def trace(self) -> TraceSettings: ...

    @property
    def log(self) -> LogSettings: ...


#: What GET /v2 and ServerMetadata list, in Triton's order (core's server.cc).
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class ServerIdentity(msgspec.Struct, frozen=True):
    """The metadata of the server."""

    name: str = "triton"
    version: str = __version__
    extensions: tuple[str, ...] = EXTENSIONS


class RepositoryControl(Protocol):
    """Control of the model repository by clients. Implemented by `kernel.repository.lifecycle`."""

    async def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the repository index. Raises `InternalError`."""

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load or reload a model; returns when it is READY. Raises `ServingError`.

        `parameters` may hold `config` (a model configuration in JSON, str) and `file:<path>` (bytes).
        """

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Start to unload a model and return at once; requests in flight finish. An unknown name is not an error."""


class KernelSettings(msgspec.Struct, frozen=True):
    """Settings of the kernel from the command line."""

    trace: TraceSettings
    log: LogSettings
    identity: ServerIdentity = ServerIdentity()
    strict_readiness: bool = True
    #: Whether clients may load and unload models at all (--model-control-mode=explicit).
    explicit_control: bool = False
    #: The last requests that were slow or failed, and the last lines of the log; None where nobody can look.
    recent: Recent | None = None
    #: `local`, `true` or `false`.
    allow_client_shm: str = "local"
    #: As in `ServerOptions`.
    max_decompression_ratio: int = 200


class RoutedCount(msgspec.Struct, frozen=True):
    """How many requests a traffic rule has sent to a version for one reason."""

    model: str
    version: int
    reason: str
    count: int


class TargetShare(msgspec.Struct, frozen=True):
    """The share of the requests without a version that a version gets, from 0 to 1."""

    model: str
    version: str
    share: float


class RolloutFigures(msgspec.Struct, frozen=True):
    """Where the rollout of a model is."""

    model: str
    candidate: int
    stable: int
    phase: str
    #: Percent of the requests that the candidate gets.
    share: int
    #: Guard → `candidate`, `candidate_bad`, `stable`, `stable_bad` → how many.
    guards: dict[str, dict[str, int]]


class KeptPair(msgspec.Struct, frozen=True):
    """A request whose outputs have differed much between the version that the client has its response of and another.

    Tensors are inline. Times are monotonic nanoseconds.
    """

    #: The model and version that got the copy.
    model: str
    version: int
    id: str
    at_ns: int
    answered_ns: int
    inputs: list[Tensor]
    requested: list[RequestedOutput]
    parameters: dict[str, str | int | bool | float]
    #: Those of the client's version; None if its response was `error`.
    outputs: list[Tensor] | None
    error: str
    #: In tolerances.
    distance: float
    #: What differs most, without and with values.
    what: str
    why: str
    byte_size: int


class ShadowFigures(msgspec.Struct, frozen=True):
    """What the shadow of a model has found."""

    model: str
    #: The version that gets the copies, as the rule names it.
    target: str
    pairs: int
    differing: int
    #: Reason → how many.
    dropped: dict[str, int]
    #: Output → kind of difference → how many.
    outputs: dict[str, dict[str, int]]
    #: Output → quantile of the distance in tolerances, such as `p50`.
    distances: dict[str, dict[str, float]]


class RewardFigures(msgspec.Struct, frozen=True):
    """What clients have reported for the requests that a version has executed."""

    model: str
    version: int
    count: int
    sum: float


class TrafficControl(Protocol):
    """The traffic rules of models. Implemented by `kernel.traffic.control.Traffic`."""

    def report(self, name: str) -> dict[str, Any]:
        """Return the rule of a model and what it means now, for JSON. Raises `ServingError` for an unknown model."""

    def change(self, name: str, members: dict[str, Any], by: str) -> None:
        """Replace members of the rule of a model; `by` is who does it, for the history. Raises `ServingError`."""

    def reset(self, name: str, by: str) -> None:
        """Give a model the rule of its file again, or none. Raises `ServingError` for an unknown model."""

    def start_rollout(self, name: str, document: dict[str, Any], by: str) -> None:
        """Begin a guarded rollout. Raises `ServingError`."""

    def command_rollout(self, name: str, action: str, by: str) -> None:
        """Pause, resume, promote or abort a rollout. Raises `ServingError`."""

    def rollout_figures(self) -> list[RolloutFigures]:
        """Return where the last rollout of each model is."""

    def reward(self, name: str, document: Any) -> dict[str, int]:
        """Count the rewards of a message for requests to a model; returns how many. Raises `ServingError`."""

    def rewards(self) -> list[RewardFigures]:
        """Return the rewards of all versions."""

    def shadow_figures(self) -> list[ShadowFigures]:
        """Return what the shadows of all models have found."""

    def worst_pairs(self, name: str) -> list[KeptPair]:
        """Return the pairs of a model that have differed most, the worst first. Raises `ServingError`."""

    def routed(self) -> list[RoutedCount]:
        """Return the counts of all rules."""

    def shares(self) -> dict[str, list[TargetShare]]:
        """Return the shares of the versions by the name of the model that has the rule."""


class CacheFigures(msgspec.Struct):
    """What a cache has done since the server started. Durations are in nanoseconds."""

    lookups: int = 0
    hits: int = 0
    #: Entries that were removed to make room for newer ones.
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0
    #: Lookups and insertions that failed, or took too long. A failed lookup counts as a miss, too.
    failures: int = 0
    #: Responses that were not stored: too large, or no memory was left.
    not_stored: int = 0
    #: How many responses the cache has, and their bytes; both only for a cache in the memory of the server.
    entries: int = 0
    used_byte_size: int = 0
    #: The most bytes that it may have; 0 for a cache elsewhere.
    byte_size: int = 0

    @property
    def misses(self) -> int:
        return self.lookups - self.hits
