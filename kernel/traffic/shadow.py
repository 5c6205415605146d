"""Sends copies of a model's requests to another version too, and compares the responses of both.

The client never waits for any of this. A request is copied before its version gets it, because a model may change its
inputs in place and a client may use its memory again. The copy is submitted after the client's response, when the
shadow has an idle instance and no request of a client waits for the version that serves them. Until it is compared, a
pair counts in the memory budget of the server and in limits of its own; what is beyond them is dropped and counted.

A version that gets nothing but copies has only the processor time that nobody else wants, where the system allows that.

Not compared: requests of sequences, those with tensors in regions of clients, which a client may change at any time,
and responses of the cache, which say nothing about the version that would have executed the request: one wrong response
would count as often as it is asked for. The shadow neither reads nor writes the cache.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import ErrorCode, ServingError
from kernel.serving.helper_tasks import MessageTask
from kernel.serving.interface import KeptPair
from kernel.serving.request import Request
from kernel.traffic.comparing import (
    COMPARE,
    CompareArguments,
    ComparedSide,
    OutputDifference,
    decode_result,
    encode_arguments,
)
from kernel.traffic.rollout_trial import bucket_of_client, is_fault
from kernel.traffic.shadow_priority import TargetPriority
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.helper_tasks import Helpers
    from kernel.serving.model import Model
    from kernel.serving.response import Response, ResponseReceiver
    from kernel.traffic.settings import OutputRule, ShadowSettings
    from kernel.traffic.shadow_priority import ShadowPriority
    from shm.blocks import ByteBudget

#: The most bytes of the inputs of a request that is copied: about a millisecond.
MOST_INPUT_BYTE_SIZE = 8 << 20

#: The most bytes of inputs and outputs of all pairs of a shadow.
MOST_WAITING_BYTE_SIZE = 64 << 20

#: How often the shadow is looked at while pairs wait for it, and how long a pair waits.
LOOK_NS = 5_000_000

LONGEST_WAIT_NS = 10_000_000_000

#: How many of the pairs that differ most are kept, and the most bytes of one.
MOST_KEPT = 10

MOST_KEPT_BYTE_SIZE = 2 << 20

#: A parameter of copies, for models that act on something outside.
PARAMETER = "naiad_shadow"

#: Distances are counted in steps on a logarithmic scale. From 1 to 10 there are this many steps.
_STEPS = 20

_QUANTILES = (50, 90, 99)


class ShadowParts(msgspec.Struct, frozen=True):
    """What shadows have of the rest of the server."""

    #: Queues a copy at a version; never raises.
    submit: Callable[[Request, Model], None]
    #: Compares large outputs. No client waits for these helpers.
    helpers: Helpers
    budget: ByteBudget
    #: None: workers keep their priority.
    priority: ShadowPriority | None = None


class PairObserver(Protocol):
    """Hears of each pair that was compared."""

    def __call__(self, bucket: int, *, differs: bool) -> None: ...


class OutputReport(msgspec.Struct):
    """What was found for one output."""

    compared: int = 0
    #: Those that have a finite distance; 0 where bytes are equal.
    measured: int = 0
    #: Kind of difference → how many.
    differing: Counter[str] = msgspec.field(default_factory=Counter)
    #: Step of the distance → how many, where bytes differed and a distance was found.
    steps: Counter[int] = msgspec.field(default_factory=Counter)
    largest: float = 0.0

    def add(self, found: OutputDifference) -> None:
        """Count one comparison."""
        self.compared += 1
        if found.kind:
            self.differing[found.kind] += 1
        if not math.isfinite(found.distance):
            return
        self.measured += 1
        if found.distance:
            step = round(_STEPS * math.log10(found.distance))
            self.steps[max(-12 * _STEPS, min(12 * _STEPS, step))] += 1
            self.largest = max(self.largest, found.distance)

    def quantiles(self) -> dict[str, float]:
        """Return quantiles of the distance in tolerances over all comparisons with a finite distance."""
        equal = self.measured - sum(self.steps.values())
        found = {}
        for percent in _QUANTILES:
            left = math.ceil(self.measured * percent / 100) - equal
            value = 0.0
            for step in sorted(self.steps):
                if left <= 0:
                    break
                left -= self.steps[step]
                value = 10 ** (step / _STEPS)
            found[f"p{percent}"] = float(f"{value:.3g}")
        return found


class ShadowReport:
    """What was found since the shadow was set."""

    def __init__(self) -> None:
        #: Requests that were chosen; each becomes a pair that was compared, or is dropped for a reason.
        self.sampled = 0
        self.pairs = 0
        self.differing = 0
        self.dropped: Counter[str] = Counter()
        #: At most `MOST_OUTPUTS`: a model may name outputs as it likes.
        self.outputs: dict[str, OutputReport] = {}
        #: The worst first: how bad, a number that makes entries different, and the pair.
        self.worst: list[tuple[float, int, KeptPair]] = []

    def add(self, found: Sequence[OutputDifference]) -> None:
        """Count a pair."""
        self.pairs += 1
        self.differing += any(each.kind for each in found)
        for each in found:
            if each.name in self.outputs or len(self.outputs) < MOST_OUTPUTS:
                self.outputs.setdefault(each.name, OutputReport()).add(each)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "sampled": self.sampled,
            "pairs": self.pairs,
            "different": self.differing,
            "dropped": dict(self.dropped),
            "outputs": {
                name: {
                    "compared": each.compared,
                    "different": dict(each.differing),
                    "distance": {**each.quantiles(), "largest": float(f"{each.largest:.3g}")},
                }
                for name, each in self.outputs.items()
            },
            "worst": [
                # Neither ids nor values of clients: everybody may read it.
                {"distance": None if math.isinf(kept.distance) else kept.distance, "why": kept.what}
                for _, _, kept in self.worst
            ],
        }


#: How many outputs a report has.
MOST_OUTPUTS = 64


class _Pair:
    """A request of a client and its copy."""

    def __init__(
        self, request: Request, inputs: list[Tensor], client_of: Model, target: Model, at_ns: int
    ) -> None:  # fmt: skip
        self.copy_of = request.id
        self.inputs = inputs
        self.outputs = [RequestedOutput(each.name, each.classification) for each in request.outputs]
        self.parameters = dict(request.parameters)
        self.priority = request.priority
        self.batch_size = request.batch_size
        self.bucket = bucket_of_client(request)
        #: The version whose response the client gets, and the one that gets the copy.
        self.client_of = client_of
        self.target = target
        self.at_ns = at_ns
        self.answered_ns = 0
        #: What the inputs take, which counts in the budget; outputs count there already, as blocks of workers.
        self.input_byte_size = sum(each.byte_size for each in inputs)
        #: What inputs and outputs take.
        self.byte_size = self.input_byte_size
        #: Outputs of both sides, with leases of their own; None for an error.
        self.first: list[Tensor] | None = None
        self.second: list[Tensor] | None = None
        #: The errors of both sides; empty for none.
        self.errors = ["", ""]

    def release(self) -> None:
        """Release the leases of the outputs."""
        for tensor in (*(self.first or ()), *(self.second or ())):
            tensor.release()
        self.first = self.second = None


class _FirstPassage(msgspec.Struct, eq=False):
    """What the response of the client passes. Implements `ResponseReceiver`."""

    inner: ResponseReceiver
    shadow: Shadow
    #: None after the final response.
    pair: _Pair | None

    def send(self, response: Response) -> None:
        if not response.final or (pair := self.pair) is None:
            self.inner.send(response)
            return
        self.pair = None
        try:
            self.shadow.answered(pair, response)
        except Exception as error:  # whatever is wrong with the shadow, the client gets its response
            self.shadow.drop(pair, f"an error of the server: {type(error).__name__}")
        self.inner.send(response)
        self.shadow.advance()  # the client has its response before its copy is submitted


class _SecondSink(msgspec.Struct, eq=False):
    """Takes the response of the copy. Implements `Sink`."""

    shadow: Shadow
    pair: _Pair
    peer: str = ""

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        self.shadow.ended(self.pair, response)


class Shadow:
    """The shadow of one model, a `kernel.serving.route.SecondReceiver`.

    It remains while the settings are the same, whatever the weights are.
    """

    def __init__(
        self, settings: ShadowSettings, outputs: dict[str, OutputRule], clock: Clock, parts: ShadowParts,
        draw: Callable[[], float],
    ) -> None:  # fmt: skip
        """`draw` returns a number from 0 to 1 for each request that could be copied."""
        self.settings = settings
        self.outputs = outputs
        self.report = ShadowReport()
        #: Set by the rollout whose guard looks at outputs.
        self.observer: PairObserver | None = None
        self._clock = clock
        self._parts = parts
        self._draw = draw
        self._share = settings.percent / 100
        #: None while it is not READY, or cannot be compared.
        self._target: Model | None = None
        #: The priority of the target's workers at the system.
        self.priority = TargetPriority(clock, parts.priority)
        self._count = 0
        self._byte_size = 0
        #: Pairs whose client has its response, the oldest first.
        self._ready: deque[_Pair] = deque()
        self._alarm: Alarm | None = None
        self._advancing = False
        #: Whether it takes no more requests.
        self.closed = False
        self._kept_number = 0

    def aim(self, target: Model | None, *, only_copies: bool = False) -> None:
        """Send copies to this version from now on. With `only_copies` no request without a version goes to it."""
        self._target = target
        self.priority.aim(target, only_copies=only_copies)

    def close(self) -> None:
        """Drop what waits, and take no more. Copies that are executed end as if nothing was."""
        self.closed, self.observer = True, None
        self.aim(None)
        while self._ready:
            self.drop(self._ready.popleft(), "the shadow ended")
        if self._alarm is not None:
            self._alarm.close()

    def is_used(self, model: Model) -> None:
        """A request of a client, or made for one, goes to `model`, which may be the target."""
        if model is self._target:
            self.priority.used()

    def forget(self) -> None:
        """Forget the kept pairs, and give their memory back."""
        for _, _, kept in self.report.worst:
            self._parts.budget.remove(kept.byte_size)
        self.report.worst.clear()

    def wants(self, request: Request, model: Model) -> bool:
        """Whether a request that `model` executes is copied."""
        target = self._target
        if target is model:
            self.priority.used()
        if target is None or target is model or request.correlation_id:
            return False
        return self._share >= 1 or self._draw() < self._share

    # ---- the way of a pair ---------------------------------------------------------------------------

    def receive(self, request: Request, model: Model) -> None:
        """Copy a checked request, or count why not. The version that serves it gets it after this call."""
        report, budget = self.report, self._parts.budget
        report.sampled += 1
        named = [each.region_of_client for each in request.inputs]
        named += [each.region_of_client for each in request.outputs]
        if any(each is not None for each in named):
            report.dropped["tensors in a region of the client"] += 1
            return
        byte_size = sum(each.byte_size for each in request.inputs)
        if byte_size > MOST_INPUT_BYTE_SIZE:
            report.dropped["inputs too large"] += 1
            return
        if self._count >= self.settings.waiting or self._byte_size + byte_size > MOST_WAITING_BYTE_SIZE:
            report.dropped["too many wait"] += 1
            return
        if not budget.has_room(byte_size):
            report.dropped["no memory"] += 1
            return
        inputs = [Tensor(each.name, each.datatype, each.shape, bytes(each.raw())) for each in request.inputs]
        assert self._target is not None, "a shadow without a target wants nothing"
        pair = _Pair(request, inputs, model, self._target, self._clock.now_ns())
        self._count += 1
        self._byte_size += byte_size
        budget.add(byte_size)
        request.passage = _FirstPassage(request.passage or request.sink, self, pair)

    def _count_outputs(self, pair: _Pair, outputs: Iterable[Tensor]) -> None:
        byte_size = sum(each.byte_size for each in outputs)
        self._byte_size += byte_size
        pair.byte_size += byte_size

    def answered(self, pair: _Pair, response: Response) -> None:
        """The client gets its response: the copy may be submitted when it has it (`advance`)."""
        error = response.error
        if error is not None and (response.refused or not _is_of_version(error)):
            self.drop(pair, "no response of the version")
            return
        if self.closed:
            self.drop(pair, "the shadow ended")
            return
        if response.cached:
            self.drop(pair, "a response of the cache")
            return
        if error is not None:
            pair.errors[0] = error.text
        else:
            pair.first = [_own(each) for each in response.outputs or ()]
            self._count_outputs(pair, pair.first)
            if self._byte_size > MOST_WAITING_BYTE_SIZE:
                self.drop(pair, "too many wait")
                return
        pair.answered_ns = self._clock.now_ns()
        self._ready.append(pair)

    def advance(self) -> None:
        """Submit copies while the shadow is idle; look again soon if some wait."""
        if self._advancing:  # a copy that is refused at once has ended within its submission
            return
        self._advancing = True
        now_ns = self._clock.now_ns()
        while self._ready and now_ns - self._ready[0].answered_ns > LONGEST_WAIT_NS:
            self.drop(self._ready.popleft(), "the shadow was not idle in time")
        while self._ready and (target := self._target) is not None and _is_idle(target):
            pair = self._ready[0]
            if pair.client_of.live.queued:  # clients come first
                break
            self._ready.popleft()
            pair.target = target
            self.priority.before_copy()
            self._parts.submit(self._copy(pair, target), target)
        self._advancing = False
        if self._ready:
            if self._alarm is None:
                self._alarm = self._clock.alarm(self.advance)
            self._alarm.set(now_ns + LOOK_NS)

    def _copy(self, pair: _Pair, target: Model) -> Request:
        return Request(
            target.name,
            [Tensor(each.name, each.datatype, each.shape, each.data) for each in pair.inputs],
            _SecondSink(self, pair),
            model_version=target.version_text,
            id=pair.copy_of,
            outputs=list(pair.outputs),
            parameters={**pair.parameters, PARAMETER: True},
            priority=pair.priority,
            batch_size=pair.batch_size,
        )

    def ended(self, pair: _Pair, response: Response) -> None:
        """The copy has a response, which is the shadow's."""
        error = response.error
        if error is not None and not _is_of_version(error):
            self.drop(pair, "the shadow did not execute it")
        elif error is not None:
            pair.errors[1] = error.text
            self._compare(pair)
        elif response.final:
            pair.second = response.outputs or []
            self._count_outputs(pair, pair.second)
            self._compare(pair)
        else:
            response.release()
            return
        if self._ready:
            self.advance()

    def _compare(self, pair: _Pair) -> None:
        first, second = pair.first, pair.second
        if first is None or second is None:
            kind = "" if first is None and second is None else "error"
            text = pair.errors[1] or f"no error, and the version that the client has: {pair.errors[0]}"
            self._finish(pair, [OutputDifference("", kind, math.inf if kind else 0.0, text)])
            return
        if _equal_inline(first, second):
            rules = self.outputs
            self._finish(
                pair,
                [OutputDifference(each.name) for each in first
                 if each.name not in rules or rules[each.name].compare != "ignore"],
            )  # fmt: skip
            return
        sources: list[Tensor] = []
        classes = {each.name for each in pair.outputs if each.classification}
        one, two = ([_side(each, sources, each.name in classes) for each in outputs] for outputs in (first, second))
        arguments = encode_arguments(CompareArguments(one, two, self.outputs))
        self._parts.helpers.add(
            MessageTask(COMPARE, arguments, sources, ended=lambda result: self._compared(pair, result))
        )

    def _compared(self, pair: _Pair, result: bytes | ServingError) -> None:
        if isinstance(result, ServingError):
            self.drop(pair, "the comparison failed")
        else:
            self._finish(pair, decode_result(result))

    def _finish(self, pair: _Pair, found: Sequence[OutputDifference]) -> None:
        self.report.add(found)
        worst = max(found, key=lambda each: each.distance if each.kind else -1.0, default=None)
        differs = worst is not None and bool(worst.kind)
        if worst is not None and differs:
            self._keep(pair, worst)
        # A client that names a version, or is sent to one by a rule, is not of the rollout; two errors are no outputs.
        if self.observer is not None and pair.bucket >= 0 and (pair.first is not None or pair.second is not None):
            self.observer(pair.bucket, differs=differs)
        self._end(pair)

    def _keep(self, pair: _Pair, worst: OutputDifference) -> None:
        """Keep the pair, if it is one of the worst. After `close` nobody would give its memory back."""
        if self.closed:
            return
        kept, budget = self.report.worst, self._parts.budget
        if len(kept) >= MOST_KEPT and kept[-1][0] <= -worst.distance:
            return
        byte_size = sum(each.byte_size for each in (*pair.inputs, *(pair.first or ())))
        if byte_size > MOST_KEPT_BYTE_SIZE or not budget.has_room(byte_size):
            return
        self._kept_number += 1
        outputs = None if pair.first is None else [_inline(each) for each in pair.first]
        where = f"output '{worst.name}': " if worst.name else ""
        pair_kept = KeptPair(
            pair.target.name, pair.target.version, pair.copy_of, pair.at_ns, pair.answered_ns, pair.inputs,
            list(pair.outputs), pair.parameters, outputs, pair.errors[0], worst.distance,
            f"{where}{worst.kind}", f"{where}{worst.kind}: {worst.text}", byte_size,
        )  # fmt: skip
        budget.add(byte_size)
        insort(kept, (-worst.distance, self._kept_number, pair_kept))
        if len(kept) > MOST_KEPT:
            budget.remove(kept.pop()[2].byte_size)

    def drop(self, pair: _Pair, reason: str) -> None:
        """Count why a pair is not compared, and end it."""
        self.report.dropped[reason] += 1
        self._end(pair)

    def _end(self, pair: _Pair) -> None:
        pair.release()
        self._count -= 1
        self._byte_size -= pair.byte_size
        self._parts.budget.remove(pair.input_byte_size)

    def check(self) -> None:
        """Recompute the invariants, for tests."""
        report = self.report
        assert report.sampled == report.pairs + sum(report.dropped.values()) + self._count, "a pair was lost"
        assert self._byte_size >= sum(pair.byte_size for pair in self._ready)
        assert len(report.worst) <= MOST_KEPT


def _is_idle(target: Model) -> bool:
    """Whether an instance of the shadow would execute a request now. An ensemble has no instances."""
    if target.live.queued or not target.ready:
        return False
    return target.in_flight < (target.instances.count or 1)


def _is_of_version(error: ServingError) -> bool:
    """Whether an error is a response of the version, and not of the server: queues, quotas, cancellations, its end."""
    return is_fault(error) or error.code is ErrorCode.INVALID_ARG


def _own(tensor: Tensor) -> Tensor:
    """Return the same output with a lease for another holder."""
    span = None if tensor.span is None else tensor.span.shared()
    return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, span)


def _inline(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.raw()))


def _equal_inline(first: Iterable[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether both have the same outputs with the same bytes, as far as that can be seen in microseconds."""
    others = {each.name: each for each in second}
    for each in first:
        other = others.pop(each.name, None)
        if other is None or each.data is None or other.data is None or each.data != other.data:
            return False
        if each.datatype != other.datatype or each.shape != other.shape:
            return False
    return not others


def _side(tensor: Tensor, sources: list[Tensor], classes: bool) -> ComparedSide:
    """Return an output for the helper, which reads large ones where they are."""
    side = ComparedSide(tensor.name, tensor.datatype, tensor.shape, classes=classes)
    if tensor.data is not None:
        side.data = bytes(tensor.data)
    elif tensor.span is None:
        side.data = b""
    else:
        side.source = len(sources)
        sources.append(Tensor(tensor.name, "UINT8", [tensor.byte_size], None, tensor.span.shared()))
    return side
