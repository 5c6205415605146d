"""The kernel: front doors submit requests here and read the state of the server; nothing here does I/O.

A request is resolved to a model version, checked, given its memory and queued, all in one call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel import __version__
from kernel.errors import ClientSharedMemoryDisabled, ServerStopping, Unavailable
from kernel.serving.catalog import parse_version
from kernel.serving.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.loop.clock import Clock
    from kernel.memory.client_regions import RegionRegistry
    from kernel.memory.input_placement import InputPlacer
    from kernel.memory.receive_buffer import Body
    from kernel.serving.catalog import Catalog, IndexItem
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.settings import LogSettings, TraceSettings

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
    """What the server says of itself."""

    name: str = "triton"
    version: str = __version__
    extensions: tuple[str, ...] = EXTENSIONS


class RepositoryControl(Protocol):
    """The model repository as clients control it. Implemented by `kernel.repository.lifecycle`."""

    async def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the repository index. Raises `InternalError`."""

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, or load it again; returns when it is READY. Raises `ServingError`.

        `parameters` may hold `config` (a model configuration in JSON, str) and `file:<path>` (bytes).
        """

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model; returns at once, requests in flight finish. Unknown names are no error."""


class Kernel:
    """The one object that front doors know."""

    def __init__(
        self,
        catalog: Catalog,
        regions: RegionRegistry,
        inputs: InputPlacer,
        clock: Clock,
        settings: KernelSettings,
    ) -> None:
        self.catalog = catalog
        self.regions = regions
        self.settings = settings
        self.identity = settings.identity
        self.trace: TraceSettings = settings.trace
        self.log: LogSettings = settings.log
        #: Set by the composition root, before any front door starts.
        self.repository: RepositoryControl
        self.stopping = False
        #: How many connections each front door has now, by protocol; filled by the doors when they start.
        self.connections: dict[str, Callable[[], int]] = {}
        self._inputs = inputs
        self._clock = clock

    # ---- health ------------------------------------------------------------------------------

    def live(self) -> bool:
        """Whether the server answers; `Server exiting` is raised while it stops (Triton)."""
        self._check_running()
        return True

    def ready(self) -> bool:
        """Whether the server takes requests; with strict readiness, whether all its models do."""
        self._check_running()
        return not self.settings.strict_readiness or self.catalog.all_ready()

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model version can execute now. Raises for unknown or not ready versions."""
        if version:
            parse_version(version)
        return self.catalog.resolve(name, version).ready

    def _check_running(self) -> None:
        if self.stopping:
            raise Unavailable("Server exiting")

    # ---- requests ----------------------------------------------------------------------------

    def resolve(self, name: str, version: str = "") -> Model:
        """Return the model version that would execute a request. Raises `ServingError`."""
        return self.catalog.resolve(name, version)

    def submit(self, request: Request) -> None:
        """Check and queue `request`; its sink gets the responses, possibly before this returns.

        Raises `ServingError` where the request is refused: nothing is sent to the sink then.
        """
        self.start(request, self.check(request))

    def check(self, request: Request) -> Model:
        """Return the model that is to execute `request`, for `start`. Raises `ServingError`."""
        model = self.catalog.resolve(request.model_name, request.model_version)
        assert request.streaming or not model.spec.decoupled, "front doors refuse decoupled models over unary calls"
        self.lease(request)
        try:
            validate(request, model.spec)
        except BaseException:
            request.release_leases()
            raise
        return model

    def lease(self, request: Request) -> None:
        """Begin a request, the first part of `check` and all that is needed where its like was checked before.

        What is known of another request holds as long as `catalog.generation` stays. Raises `ServingError`.
        """
        if self.stopping:
            raise ServerStopping(request.id)
        request.received_ns = self._clock.now_ns()
        try:
            self._inputs.lease(request)  # first: Triton looks regions up while it decodes
        except BaseException:
            request.release_leases()
            raise

    def receive(self, model: Model, byte_size: int, first_tensor: int) -> Body | None:
        """Return where to receive the body of a request for `model`; see `InputPlacer.body`."""
        return self._inputs.body(model, byte_size, first_tensor)

    def start_small(self, request: Request, model: Model) -> None:
        """Queue a request whose like was checked, and whose inputs are all small and travel in the message.

        The same as `lease` and `start`, without looking at each tensor. Raises `ServingError`.
        """
        if self.stopping:
            raise ServerStopping(request.id)
        request.received_ns = self._clock.now_ns()
        model.submit(request)

    def start(self, request: Request, model: Model, body: Body | None = None) -> None:
        """Queue a request that was checked, or leased. Raises `ServingError` as `submit`.

        `body` is what the request was received in, and stays the caller's to release.
        """
        try:
            self._inputs.place_large(request, model, body)
        except BaseException:
            request.release_leases()
            raise
        model.submit(request)

    def cancel(self, request: Request) -> None:
        """The client of a submitted request has gone. The request still gets its final response."""
        if request.model is not None:
            request.model.cancel(request)

    def check_client_shm(self, *, local_peer: bool) -> None:
        """Raise unless a client may register shared memory: by default only one on this machine."""
        allowed = self.settings.allow_client_shm
        if allowed == "false" or (allowed == "local" and not local_peer):
            raise ClientSharedMemoryDisabled

    # ---- stopping ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and have no final response yet."""
        return sum(model.in_flight for model in self.catalog.ready_models())

    async def drain(self) -> None:
        """Refuse new requests and wait until every accepted one has its final response."""
        self.stopping = True
        await asyncio.gather(*(model.drain() for model in self.catalog.ready_models()))

    def abandon(self) -> None:
        """Answer what is still unanswered with an error: the exit time-out has expired."""
        for model in self.catalog.ready_models():
            model.abandon(Unavailable("Server exiting: the request took longer than the exit timeout"))


class KernelSettings(msgspec.Struct, frozen=True):
    """How the kernel behaves, from the command line."""

    trace: TraceSettings
    log: LogSettings
    identity: ServerIdentity = ServerIdentity()
    strict_readiness: bool = True
    #: `local`, `true` or `false`.
    allow_client_shm: str = "local"
