"""Begins the traces of requests: decides which are traced, gives them ids, and starts the helper that writes them.

`Kernel.submit` asks for each request while something can be traced at all. Every n-th request is traced, up to a
number: the server's settings and those of each model with settings of its own have a sampler each (Triton's
`TraceSetting`). A change of the settings takes effect with the next request.

The helper is started for the first trace that has ended; without traces there is none.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unsupported
from kernel.records.front_doors import front_door_of
from kernel.records.trace import QUEUE_INPUT, SpanIds, TensorMemory, traced_inline
from kernel.records.trace_context import parse_trace_context
from kernel.records.traced_passage import TracedPassage
from kernel.server_parts import ServerPart, TraceFigures
from kernel.serving.helper_tasks import Helpers

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.loop.clock import Clock
    from kernel.records.trace import Trace, TraceOutput
    from kernel.records.trace_context import CallerContext
    from kernel.records.trace_export import CollectorDestination
    from kernel.records.trace_writer import TraceWriter
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.settings import TraceSettings, TraceValues


#: How many requests before one that is traced front doors begin to take times: as many may be on their way.
NEAR = 64


class Sampler:
    """Counts the requests that have the same settings."""

    __slots__ = ("opentelemetry", "remaining", "tensors", "until", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self.opentelemetry = values.trace_mode == "opentelemetry"
        self.tensors = "TENSORS" in values.trace_level and not self.opentelemetry
        #: How many more requests may be traced; -1 for no limit.
        self.remaining = values.trace_count
        #: How many requests it takes until one is traced; for ever if the rate is 0.
        self.until = values.trace_rate

    def hit(self) -> bool:
        """Count a request, and return whether it is traced: the first one is the `trace_rate`-th."""
        self.until -= 1
        return not self.until and self.begin_next()

    def begin_next(self) -> bool:
        """Begin to count again: `until` is 0. Returns whether the present request is traced."""
        self.until = self.values.trace_rate
        if self.remaining == 0:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True


class Tracer:
    """The samplers of the server and of models with settings of their own."""

    def __init__(self, settings: TraceSettings, clock: Clock) -> None:
        """Nothing is traced before `start`."""
        self._settings = settings
        self._now_ns = clock.now_ns
        self._output_for: Callable[[TraceValues], TraceOutput] | None = None
        #: By model, "" for the server; with the settings that are on only. A model with settings of its own that are
        #: off has None.
        self._samplers: dict[str, Sampler | None] = {}
        self._outputs: dict[Sampler, TraceOutput] = {}
        #: The sampler of all requests, if no model has settings of its own and clients cannot ask to be traced.
        self._only: Sampler | None = None
        self._only_output: TraceOutput | None = None
        #: The same output, if each of these requests gets a trace of times, and nothing is to be counted.
        self._every_output: TraceOutput | None = None
        #: The tensors of all traces.
        self._tensors = TensorMemory()
        self._new_id = itertools.count(1).__next__
        #: Called when it changes whether anything can be traced.
        self.on_switch: Callable[[bool], object] = _ignored
        #: Called when it changes whether one of the next requests may be traced, so that times are to be taken.
        self.on_near: Callable[[bool], object] = _ignored
        #: How many of the next requests of clients are certainly not traced: `Kernel.submit` counts them here, and
        #: calls `begin` only for those that ask for an explanation. Always 0 while a recorder sees each request.
        self.passing = 0
        self._looks_at_each = False

    def start(self, output_for: Callable[[TraceValues], TraceOutput]) -> None:
        """Trace from now on. `output_for` returns where traces with given settings go."""
        self._output_for = output_for
        self._settings.remaining = self._remaining
        self._settings.on_change = self._changed
        self._changed("")

    @property
    def on(self) -> bool:
        """Whether any request can be traced."""
        return bool(self._outputs)

    def stop(self) -> None:
        """Begin no more traces before the settings change: they cannot be written."""
        self._count_passing()
        self._settings.stop()
        self._samplers = dict.fromkeys(self._samplers)
        self._outputs.clear()
        self._switch()

    # ---- requests ----------------------------------------------------------------------------

    def begin(self, request: Request, model: Model) -> None:
        """Trace a checked request if it is its turn, or if it asks for an explanation."""
        every_output = self._every_output
        if every_output is not None and request.parent is None and not request.explain:
            sink = request.sink
            door = front_door_of(sink)
            request.trace = request.passage = TracedPassage(
                self._new_id(), model, every_output, sink, door, request, self._now_ns, usual=door is not None
            )
            return
        only = self._only
        if only is not None and request.parent is None and not request.explain:
            # The usual case, without further calls: all models have the settings of the server.
            only.until = until = only.until - 1
            if until:
                if until == NEAR:
                    self.on_near(True)
                elif until > NEAR and not self._looks_at_each:
                    self.passing, only.until = until - NEAR - 1, NEAR + 1
                return
            only.until = until = only.values.trace_rate  # as `Sampler.begin_next`
            if until > NEAR:
                self.on_near(False)
            if only.remaining:
                only.remaining -= only.remaining > 0
                id, sink = self._new_id(), request.sink
                door = front_door_of(sink)
                request.trace = request.passage = TracedPassage(
                    id, model, self._only_output, sink, door, request, self._now_ns,
                    usual=door is not None and not only.tensors, tensors=self._tensors if only.tensors else None,
                )  # fmt: skip
            return
        parent = request.trace_parent
        if parent is not None:
            if parent.trace is not None:
                self._begin_child(request, model, parent.trace)
        elif request.parent is None and self.passing:  # it only asks for an explanation
            self.passing -= 1
        elif request.parent is None and self._outputs:
            self._sample(request, model)
        if request.explain and request.trace is None:
            self._attach(request, model, 0, None)

    def look_at_each(self, always: bool) -> None:
        """Count no requests as passing while `always`: a recorder must see each request before `begin` gets it."""
        self._count_passing()
        self._looks_at_each = always

    def _count_passing(self) -> None:
        """Let no more requests pass before the next one was looked at; those that have passed count."""
        if self._only is not None:
            self._only.until += self.passing
        self.passing = 0

    def _sample(self, request: Request, model: Model) -> None:
        """Trace the request of a client if it is its turn, or if the client records a trace."""
        samplers, name = self._samplers, model.name
        sampler = samplers[name] if name in samplers else samplers.get("")
        if sampler is None:
            return
        context: CallerContext | None = None
        if sampler.opentelemetry:
            traceparent = request.sink.header("traceparent")
            if traceparent:
                context = parse_trace_context(traceparent, request.sink.header("tracestate"))
        if sampler.hit() or (context is not None and context.sampled):
            self._begin_root(request, model, sampler, context)

    def _begin_root(self, request: Request, model: Model, sampler: Sampler, context: CallerContext | None) -> None:
        id = self._new_id()
        spans = _root_spans(context) if sampler.opentelemetry else None
        self._attach(
            request, model, id, self._outputs[sampler], tensors=self._tensors if sampler.tensors else None, spans=spans
        )

    def _begin_child(self, request: Request, model: Model, parent: Trace) -> None:
        output, spans = parent.output, parent.spans
        if output is None or parent.has_ended:  # or it is explained only
            return
        id = self._new_id()
        if spans is not None:
            own, compute = _span_ids(2)
            spans = SpanIds(spans.trace_id, "", own, compute, spans.model, spans.state)
        self._attach(request, model, id, output, tensors=parent.tensors, parent_id=parent.id, spans=spans)

    def _attach(
        self,
        request: Request,
        model: Model,
        id: int,
        output: TraceOutput | None,
        *,
        tensors: TensorMemory | None = None,
        parent_id: int = 0,
        spans: SpanIds | None = None,
    ) -> None:
        """Let the responses of `request` pass its trace; without `output` it only explains the request."""
        door = front_door_of(request.sink)
        request.trace = request.passage = TracedPassage(
            id,
            model,
            output,
            request.sink,
            door,
            request,
            self._now_ns,
            usual=door is not None and not (tensors or request.explain or parent_id or spans),
            tensors=tensors,
            explains=request.explain,
            parent_id=parent_id,
            spans=spans,
        )

    # ---- settings ----------------------------------------------------------------------------

    def _remaining(self, model: str) -> int | None:
        sampler = self._samplers.get(model)
        return None if sampler is None else sampler.remaining

    def _changed(self, model: str) -> None:
        self._count_passing()
        if model and self._outputs:  # without any, all may have stopped
            self._make_sampler(model)
        else:
            for name in ("", *self._settings.models):
                self._make_sampler(name)
        self._switch()

    def _switch(self) -> None:
        """The samplers have changed."""
        shared = self._samplers.get("")
        alone = shared is not None and len(self._samplers) == 1 and not shared.opentelemetry
        self._only = shared if alone else None
        self._only_output = self._outputs.get(shared) if alone and shared is not None else None
        only = self._only
        uncounted = only is not None and only.values.trace_rate == 1 and only.remaining < 0 and not only.tensors
        self._every_output = self._only_output if uncounted else None
        self.on_switch(self.on)
        self.on_near(self.on and (self._only is None or self._only.until <= NEAR))

    def _make_sampler(self, model: str) -> None:
        former = self._samplers.pop(model, None)
        if former is not None:
            self._outputs.pop(former, None)
        if model and model not in self._settings.models:
            return
        values = self._settings.get(model)
        works = values.trace_level != ("OFF",) and not (
            values.trace_mode == "triton" and (not values.trace_file or not values.trace_rate)
        )
        self._samplers[model] = None
        if works and self._output_for is not None:
            sampler = self._samplers[model] = Sampler(values)
            self._outputs[sampler] = self._output_for(values)


def trace_ensemble_inputs(request: Request) -> None:
    """Add the inputs of a request that no worker will get: the steps of an ensemble have them."""
    trace = request.trace
    if trace is not None and trace.tensors is not None:
        trace.add_tensors([traced_inline(QUEUE_INPUT, tensor) for tensor in request.inputs])


def _root_spans(context: CallerContext | None) -> SpanIds:
    root, model, compute = _span_ids(3)
    if context is None:
        return SpanIds(secrets.token_hex(16), root, model, compute, "")
    return SpanIds(context.trace_id, root, model, compute, context.span_id, context.state)


def _span_ids(count: int) -> list[str]:
    """Return random ids, which one system call makes together."""
    digits = secrets.token_hex(8 * count)
    return [digits[begin : begin + 16] for begin in range(0, 16 * count, 16)]


def _ignored(on: bool) -> None:
    """Ignore a change."""


#: How long the last traces may take to be written when the server stops, in seconds.
CLOSE_TIMEOUT_S = 5.0


class TraceHelpers(Helpers, Protocol):
    """Helpers that do nothing but write traces."""

    async def close(self) -> None:
        """Stop the helpers. Tasks that wait or run fail."""


class Tracing(ServerPart):
    """Traces of one server, of which it is a part."""

    def __init__(self, tracer: Tracer, helpers: TraceHelpers, startup: TraceValues) -> None:
        """`helpers` have no other tasks: a full disk or a collector that hangs delays none. `close` closes them.

        Raises `Unsupported` if the settings at the start need packages that are not installed.
        """
        if startup.trace_mode == "opentelemetry":
            from kernel.records.trace_export import missing_packages  # most servers trace nothing

            if missing := missing_packages():
                raise Unsupported(missing)
        self._tracer = tracer
        self._helpers = helpers
        self._writer: TraceWriter | None = None
        self._collector: CollectorDestination | None = None

    async def start(self) -> None:
        """Trace from now on."""
        self._tracer.start(self._output_for)

    def figures(self) -> TraceFigures:
        return (
            TraceFigures()
            if self._writer is None
            else TraceFigures(self._writer.written_count, self._writer.lost_count)
        )

    def _output_for(self, values: TraceValues) -> TraceOutput:
        from kernel.records.trace_writer import CollectorOutput, TraceWriter  # as above

        if self._writer is None:
            self._writer = TraceWriter(self._helpers, self._tracer.stop)
        if values.trace_mode == "triton":
            return self._writer.file_output(values)
        if self._collector is None:
            from kernel.records.trace_export import CollectorDestination  # as above

            self._collector = CollectorDestination(values)  # its settings stay as at the start
        return CollectorOutput(self._writer, self._collector)

    async def close(self) -> None:
        """Write what waits, and end the helpers."""
        if self._writer is not None:
            await self._writer.close(CLOSE_TIMEOUT_S)
        await self._helpers.close()
