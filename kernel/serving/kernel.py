"""The kernel: front doors submit requests here and read the state of the server. Nothing here does I/O.

One call resolves a request to a model version, checks it, places its inputs and queues it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from kernel.errors import (
    ClientSharedMemoryDisabled,
    DecoupledOverUnary,
    InvalidArgument,
    ModelNotReady,
    NoAvailableVersion,
    ServerStopping,
    ServingError,
    Unavailable,
    failing_as,
)
from kernel.loop.cancellations import Cancellations
from kernel.observe.internal_errors import unexpected_error
from kernel.serving.calls import Calls, NestedLoads
from kernel.serving.catalog import parse_version
from kernel.serving.helper_tasks import NoHelpers
from kernel.serving.model import all_healthy
from kernel.serving.model_figures import figures_of, instance_figures
from kernel.serving.route import ModelRoute, RouteRules, Wait, WaitingRequests, WithSecond, route_to
from kernel.serving.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.loop.clock import Clock
    from kernel.memory.client_regions import RegionRegistry
    from kernel.memory.input_placement import InputPlacer, ReceiveBuffer
    from kernel.observe.gpu_figures import GpuFigureReader
    from kernel.records.tracer import Tracer
    from kernel.server_parts import ServerPart
    from kernel.serving.catalog import Catalog, IndexItem
    from kernel.serving.helper_tasks import FrontDoorHelpers, Helpers
    from kernel.serving.interface import KernelSettings, RepositoryControl, TrafficControl
    from kernel.serving.model import Model
    from kernel.serving.model_figures import InstanceFigures, ModelCounters, ModelFigures
    from kernel.serving.prepared import PreparedRequest
    from kernel.serving.request import Request
    from kernel.serving.route import RouteRule, SecondReceiver
    from kernel.settings import LogSettings, TraceSettings
    from shm.arena import Block

_Figures = TypeVar("_Figures")


class RequestRecorder(Protocol):
    """Records requests. Implemented by `kernel.records.recorder`."""

    def begin(self, request: Request, model: Model) -> None:
        """Record a checked request if it is its turn. It has its trace already."""

    def refused(self, request: Request, model: Model, error: ServingError) -> None:
        """Record a request that was decoded, and refused before it was queued, if it is its turn."""


class Kernel:
    """Decides what happens to requests.

    Front doors see it as `kernel.serving.interface.KernelInterface`, which describes the methods without a docstring.
    """

    def __init__(
        self, catalog: Catalog, regions: RegionRegistry, inputs: InputPlacer, clock: Clock, settings: KernelSettings,
        tracer: Tracer, parts: KernelParts | None = None,
    ) -> None:  # fmt: skip
        parts = parts or KernelParts()
        self.catalog = catalog
        self.regions = regions
        self.settings = settings
        self.identity = settings.identity
        self.trace: TraceSettings = settings.trace
        self.log: LogSettings = settings.log
        self.tracer = tracer
        #: Whether any request can be traced or recorded; whether front doors take times: one of the next may be traced.
        self.traces = self.takes_times = False
        self.tracer.on_switch = self._switch_traces
        self.tracer.on_near = self._switch_times
        #: Records requests; None for most servers.
        self.recorder: RequestRecorder | None = None
        self.repository = parts.repository
        self.helpers = parts.helpers
        self.text_helpers = parts.text_helpers
        self.traffic = parts.traffic
        self.stopping = False
        #: The models of the start load: the server is live and not ready.
        self.starting = parts.starting
        #: The start failed, and the server runs only to say so (--exit-on-error=false).
        self.start_failed = False
        self.server_parts = parts.server_parts
        self.lost_log_lines = parts.lost_log_lines
        self.gpu_figures = parts.gpu_figures
        #: The requests that models send to other models.
        self.calls = Calls(self, catalog, clock)
        #: Cancels requests whose client has left, many in several iterations. Each still gets its final response.
        self.cancel: Callable[..., None] = Cancellations(clock).add
        self.nested_loads = NestedLoads()
        #: The requests whose rule cannot decide yet, and the rules of models, by name.
        self.waiting = WaitingRequests(self._submit_again, clock)
        self.rules = parts.rules or RouteRules(catalog)
        self._rules = self.rules.by_name
        self._inputs = inputs
        self.memory_refusals = inputs.refusals
        #: What the tensors of all requests may take.
        self.budget = self._budget = inputs.budget
        self._clock = clock
        #: How many admitted requests are not submitted yet, because they are being decoded.
        self._preparing = 0
        self._all_prepared = asyncio.Event()

    # ---- health ------------------------------------------------------------------------------

    def live(self) -> bool:
        """Whether the server has started. Raises `Unavailable` ("Server exiting") while it stops (Triton)."""
        self._check_running()
        return not self.start_failed

    def ready(self) -> bool:
        """Whether the server accepts requests; with strict readiness, whether all its models are ready."""
        self._check_running()
        if self.start_failed or self.starting:
            return False
        return not self.settings.strict_readiness or self.catalog.all_ready()

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model version can execute now. Raises `ServingError` for versions that are unknown or not READY."""
        if version and not self.catalog.has_label(name, version):
            parse_version(version)
        return self.catalog.can_execute(self.catalog.resolve(name, version))

    async def server_is_ready(self) -> bool:
        """As `ready`; with strict readiness, models say as well whether they are ready."""
        if not self.ready():
            return False
        return not self.settings.strict_readiness or await all_healthy(self.catalog.ready_models())

    async def model_is_ready(self, name: str, version: str = "") -> bool:
        """As `model_ready`; the model itself, or the models of an ensemble's steps, may be asked."""
        if not self.model_ready(name, version):
            return False
        return await all_healthy(self.catalog.with_steps(self.catalog.resolve(name, version)))

    def _check_running(self) -> None:
        if self.stopping:
            raise Unavailable("Server exiting")

    # ---- requests ----------------------------------------------------------------------------

    def served(self, name: str, version: str = "") -> Model:
        """Return a model version that serves. Raises `ServingError`."""
        return self.catalog.resolve(name, version)

    @property
    def generation(self) -> int:
        """Grows with every change of the models: what `resolve` has returned before may no longer be right."""
        return self.catalog.generation

    def resolve(self, name: str, version: str = "", namespace: str = "") -> Model:
        """Return the model version for a request, in the repository `namespace` first. Raises `ServingError`.

        That may be an unloaded version that finishes its sequences; it refuses other requests.
        """
        try:
            return self.catalog.resolve(name, version, namespace)
        except (ModelNotReady, NoAvailableVersion):
            finishing = self.catalog.finishing(name, version, namespace)
            if finishing is None:
                raise
            return finishing

    def has_rules(self) -> bool:
        """Whether the requests to any model have a rule."""
        return bool(self._rules)

    def resolve_for(
        self, request: Request, parent: Request, name: str, version: str = "", namespace: str = ""
    ) -> Model:
        """As `resolve`, for `request` that is made for `parent`: the rule of the model decides as for the parent.

        Raises `ServingError`.
        """
        if not version and (rule := self._rules.get(name)) is not None:
            chosen = rule.choose_for(request, parent)
            if chosen is not None:
                return chosen
        return self.resolve(name, version, namespace)

    def route(self, name: str, version: str = "") -> ModelRoute:
        return route_to(self.resolve(name, version), self._rules.get(name))

    def unary_route(self, name: str, version: str, entry_point: str) -> ModelRoute:
        route = self.route(name, version)
        if route.spec.decoupled:
            raise DecoupledOverUnary(entry_point)
        return route

    def submit(
        self, request: Request, prepared: PreparedRequest | None = None, received_in: ReceiveBuffer | None = None,
        route: ModelRoute | None = None, *, admitted: bool = False, pinned: Model | None = None, checked: bool = False,
    ) -> None:  # fmt: skip
        """Check and queue `request`; its sink gets all responses, also a refusal. Never waits, and never raises.

        Args:
            prepared: what `request` was made from, at the same `catalog.generation`: only client regions are checked.
            received_in: the buffer with the request's large tensors. The caller releases it.
            route: the route whose signature the request fits, at the same `catalog.generation`.
            admitted: whether `begin_preparing` has admitted the request: then it is accepted while the server drains.
            pinned: the version to execute it, which its parent has pinned (`Model.pin`). The parent has paid for it.
            checked: whether the same version has checked an equal request; this one has its `batch_size` and no region.
        """
        budget = self._budget
        second: SecondReceiver | None = None
        try:
            way = prepared.route if prepared is not None else route or pinned or self._route_for(request)
            model = pinned or way.model  # type: ignore[union-attr]  # it is no `Model` here
            if way.rule is not None:
                if (chosen := self._choose(way, way.rule, request, received_in, admitted=admitted)) is None:
                    return  # it waits
                model, second = (chosen.model, chosen.second) if isinstance(chosen, WithSecond) else (chosen, None)
                if model.spec is not way.spec:  # it may have another signature
                    prepared, route, checked = None, None, False
            if self.stopping and not admitted and pinned is None and not model.continues(request):
                raise ServerStopping(request.id)
            if budget.used_byte_size > budget.limit_byte_size and pinned is None:
                raise self.memory_refusals.full()
            request.received_ns = request.received_ns or self._clock.now_ns()  # it may have waited
            if prepared is None or not prepared.small:
                try:
                    if not checked:
                        self._inputs.lease(request)  # before the check: Triton looks up regions while it decodes
                        if prepared is None and route is None:
                            validate(request, model.spec)
                    self._inputs.place_large(request, model, received_in)
                except ServingError as error:
                    if self.recorder is not None:
                        self.recorder.refused(request, model, error)
                    raise
            if self.traces or request.explain:
                if self.tracer.passing and request.parent is None and not request.explain:
                    self.tracer.passing -= 1
                else:
                    self.tracer.begin(request, model)
                    if self.recorder is not None:
                        self.recorder.begin(request, model)
            if second is not None:
                second.receive(request, model)
            (model.entrance or model).submit(request)
        except Exception as error:
            request.refuse(_submission_error(request, error))
            return
        if not request.dispatched and pinned is None and not request.finished:  # an instance has only a few
            request.count_in(budget)

    def submit_copy(self, request: Request, model: Model) -> None:
        """Queue a copy of a checked request at `model`, past its response cache, traces and recordings. Never raises.

        Its inputs are inline, and no output goes to a region of a client.
        """
        try:
            with failing_as(partial(_submission_error, request), passes=ServingError):
                if self.stopping:
                    raise ServerStopping(request.id)
                request.received_ns = self._clock.now_ns()
                validate(request, model.spec)  # the version may have another signature than the client's
                self._inputs.place_large(request, model, None)
                model.submit(request)
        except ServingError as error:
            request.refuse(error)
            return
        if not request.dispatched and not request.finished:
            request.count_in(self._budget)

    def _choose(
        self,
        way: ModelRoute | Model,
        rule: RouteRule,
        request: Request,
        received_in: ReceiveBuffer | None,
        *,
        admitted: bool,
    ) -> Model | WithSecond | None:
        """Return what the rule has chosen for `request`; None if the request waits. Raises `ServingError`."""
        chosen = rule.choose(request)
        if not isinstance(chosen, Wait):
            version = chosen.model if isinstance(chosen, WithSecond) else chosen
            own = version.rule  # the version may have replaced one that has begun the sequence of the request
            if own is None or own is rule:
                return chosen
            return self._choose(version, own, request, received_in, admitted=admitted)
        if self.stopping and not admitted:
            raise ServerStopping(request.id)
        if self._budget.used_byte_size > self._budget.limit_byte_size:
            raise self.memory_refusals.full()
        request.received_ns = request.received_ns or self._clock.now_ns()
        self._inputs.lease(request)
        validate(request, way.spec)
        self._inputs.place_large(request, way.model if isinstance(way, ModelRoute) else way, received_in)
        request.count_in(self._budget)
        self.waiting.add(request, rule, chosen)
        return None

    def _submit_again(self, request: Request) -> None:
        """Submit a request that has waited."""
        self._budget.used_byte_size -= request.byte_size  # it is counted again if it has to be queued
        request.budget = None
        self.submit(request, admitted=True)

    def _switch_traces(self, on: bool) -> None:
        self.traces = on or self.recorder is not None

    def record_by(self, recorder: RequestRecorder | None) -> None:
        """Let `recorder` see requests from now on; None ends that."""
        self.recorder = recorder
        self.tracer.look_at_each(recorder is not None)
        self._switch_traces(self.tracer.on)

    def _switch_times(self, on: bool) -> None:
        self.takes_times = on

    def _route_for(self, request: Request) -> ModelRoute:
        """Return the route of a request that no front door has checked. Raises `ServingError`."""
        if request.streaming:
            return self.route(request.model_name, request.model_version)
        return self.unary_route(request.model_name, request.model_version, request.entry_point)

    def begin_preparing(self, request: Request, byte_size: int) -> None:
        """Admit `request`, which cannot be submitted before it was decoded. Raises `ServerStopping` or `MemoryFull`.

        It counts `byte_size` bytes until `end_preparing`, which follows once it was submitted or refused.
        """
        if self.stopping:
            raise ServerStopping(request.id)
        if not self._budget.has_room(byte_size):
            raise self.memory_refusals.full()
        self._budget.add(byte_size)
        self._preparing += 1

    def end_preparing(self, byte_size: int) -> None:
        self._preparing -= 1
        self._budget.remove(byte_size)
        assert self._preparing >= 0, "more requests were prepared than admitted"
        if not self._preparing:
            self._all_prepared.set()

    def check_shapes(self, request: Request, route: ModelRoute) -> None:
        validate(request, route.spec)

    def memory_for(self, route: ModelRoute, byte_size: int) -> Block:
        return self._inputs.take(route.model, byte_size)

    def message_buffer(self, byte_size: int) -> ReceiveBuffer:
        return self._inputs.message_buffer(byte_size)

    def memory_for_helper(self, byte_size: int) -> Block:
        return self._inputs.take_for_helper(byte_size)

    def receive_buffer(self, route: ModelRoute, byte_size: int, first_tensor: int) -> ReceiveBuffer | None:
        return self._inputs.receive_buffer(route.model, byte_size, first_tensor)

    def clear_poison(self, name: str, version: str = "") -> int:
        model = self.served(name, version)
        if model.poison is None:
            raise InvalidArgument(f"model '{model.name}' remembers no requests (parameter naiad.isolate_poison)")
        return model.poison.clear()

    def check_client_shm(self, *, local_peer: bool) -> None:
        allowed = self.settings.allow_client_shm
        if allowed == "false" or (allowed == "local" and not local_peer):
            raise ClientSharedMemoryDisabled

    def check(self) -> None:
        """Recompute the invariants of every model's requests and batches; for tests."""
        for model in self.catalog.ready_models():
            model.check()
        self.waiting.check()
        self.calls.check()

    # ---- figures -----------------------------------------------------------------------------

    def figures(self, name: str = "") -> list[ModelFigures]:
        return [figures_of(model) for model in self.catalog.ready_models(name)]

    def counters(self) -> Sequence[ModelCounters]:
        return self.catalog.executing_models()

    @property
    def queued(self) -> int:
        return sum(model.live.queued + model.instances.waiting for model in self.catalog.executing_models())

    def served_figures(self, name: str, version: str = "") -> ModelFigures:
        return figures_of(self.served(name, version))

    def loaded_figures(self, identifier: str, version: int) -> ModelFigures | None:
        entry = self.catalog.entry(identifier, version)
        return None if entry is None or entry.model is None else figures_of(entry.model)

    def instance_figures(self, identifier: str, version: int) -> list[InstanceFigures]:
        entry = self.catalog.entry(identifier, version)
        return [] if entry is None or entry.model is None else instance_figures(entry.model)

    def part_figures(self, kind: type[_Figures]) -> list[_Figures]:
        return [figures for part in self.server_parts if isinstance(figures := part.figures(), kind)]

    # ---- stopping ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """The number of requests of clients that were accepted and have no final response yet."""
        return self._preparing + len(self.waiting) + sum(model.root_count for model in self.catalog.executing_models())

    async def drain(self) -> None:
        """Refuse new requests and wait until every accepted one has its final response.

        Requests of sequences that have begun are still accepted, but nobody waits for them.
        """
        self.stopping = True
        while self._preparing:
            self._all_prepared.clear()
            await self._all_prepared.wait()
        await self.waiting.drain()
        await asyncio.gather(*(model.drain() for model in self.catalog.executing_models()))

    def abandon(self) -> None:
        """Fail all requests that have no final response: the exit timeout has expired."""
        error = Unavailable("Server exiting: the request took longer than the exit timeout")
        self.waiting.fail_all(error)
        for model in self.catalog.executing_models():
            model.abandon(error)


def _submission_error(request: Request, error: Exception) -> ServingError:
    if isinstance(error, ServingError):
        return error
    return unexpected_error(f"the submission of a request to model '{request.model_name}'", error)


class NoRepository:
    """The repository of a kernel whose models do not come from one."""

    async def index(self, ready: bool = False) -> list[IndexItem]:
        raise Unavailable("the server has no model repositories")

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        raise Unavailable("the server has no model repositories")

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        raise Unavailable("the server has no model repositories")


class KernelParts(msgspec.Struct, frozen=True):
    """What the kernel has of the rest of the server, and what front doors reach through it. None of it changes."""

    repository: RepositoryControl = NoRepository()
    helpers: FrontDoorHelpers = NoHelpers()
    #: They render chat templates and tokenize.
    text_helpers: Helpers = NoHelpers()
    #: The rules of models, which other parts set; None for rules that only the kernel has.
    rules: RouteRules | None = None
    #: None where clients cannot set traffic rules.
    traffic: TrafficControl | None = None
    #: All parts of the server, also those that are added later.
    server_parts: list[ServerPart] = []
    #: Whether the models of the start are still to be loaded.
    starting: bool = False
    #: The figures of GPUs; None if no GPU can be used, or nobody reads them.
    gpu_figures: GpuFigureReader | None = None
    #: Returns how many lines of the log were lost.
    lost_log_lines: Callable[[], int] = int
