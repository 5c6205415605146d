"""The evidence of a rollout: which executions of both versions were bad, by step. Pure.

Evidence are requests that the split has sent to a version: not those of clients that named it, nor responses of the
cache. Where keys are sticky, each bucket of keys counts once in a step, because the requests of one key are alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from kernel.errors import ErrorCode, ExecutionTimeout, NoInstanceInTime, SequenceLost, WorkerLost
from kernel.traffic.verdicts import GUARDS, BadEvents, Counts, Guard, GuardVerdict, judge, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.observe.execution_reports import ExecutionTimes
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request
    from kernel.traffic.rollout_states import RolloutSettings

Side = Literal["candidate", "stable"]

_METRIC = "metric:"

#: How many executions of the stable version decide what is slow.
BASELINE = 500

#: What counts when the stable version gets nothing that the candidate could be compared with: the share of errors that
#: is accepted, more than which stops the rollout. Twice what the stable version had is accepted, too.
_ALONE = Guard("errors", 0.35, at_most=0.01, events="requests")

#: The same where nothing is known of the stable version, after a restart at 100 %: more stops, between both is unsure.
_ALONE_UNKNOWN = 0.1

#: A counter that grows by more between two looks (200 ms) does not count requests.
MOST_ADDED = 1e7

#: `verdicts.evidence_above` compares with shares that are more than one and a half times as large: of more than this
#: bound nothing stops.
_MOST_BOUND = 0.6


class RolloutTrial:
    """Counts for the guards of one rollout. At most 10,000 buckets are remembered for each guard."""

    def __init__(self, settings: RolloutSettings, *, sticky: bool) -> None:
        #: The counters of the versions that are looked at.
        self.metrics = [name.removeprefix(_METRIC) for name in settings.guards if name.startswith(_METRIC)]
        self._guards = [self._guard(name, settings) for name in settings.guards]
        #: Counter and side → its last value.
        self._values: dict[tuple[str, Side], float] = {}
        self._sticky = sticky
        self._counts = {guard.name: Counts(bad=[]) for guard in self._guards}
        #: Errors at a share of 100 %.
        self._alone = Counts(bad=[BadEvents(1.0)])
        self._share = 0
        #: Requests of the candidate in this step.
        self.requests = 0
        self._baseline: list[int] = []
        self.slow_ns: int | None = None if settings.slow_ms is None else round(settings.slow_ms * 1e6)
        #: Guard → side → buckets whose first event was counted in this step; and the same of bad events.
        self._seen: dict[tuple[str, Side, bool], set[int]] = {}

    def _guard(self, name: str, settings: RolloutSettings) -> Guard:
        if name == "outputs":
            return msgspec.structs.replace(GUARDS[name], at_most=settings.differences / 100)
        if name in GUARDS:
            return GUARDS[name]
        # They share the part of `outputs`, which no rollout has beside them.
        event = f"events of {name.removeprefix(_METRIC)}"
        return Guard(name, GUARDS["outputs"].part / len(self.metrics), ratio=2.0, event=event)

    def begin_step(self, share: int) -> None:
        """Count for a share of the candidate, in percent. With the same share, counted keys stay counted."""
        if share != self._share:
            self._seen.clear()
        self._share, self.requests = share, 0
        if 0 < share < 100:
            for counts in self._counts.values():
                # People may pause and resume as often as they like: the same share goes on.
                if not counts.bad or counts.bad[-1].share != share / 100:
                    counts.bad.append(BadEvents(share / 100))

    def executed(self, side: Side, bucket: int, duration_ns: int) -> None:
        """An execution of a request has succeeded."""
        self._count("errors", side, bucket, bad=False)
        if self.slow_ns is not None:
            self._count("latency", side, bucket, bad=duration_ns > self.slow_ns)
        elif side == "stable":
            self._baseline.append(duration_ns)
            if len(self._baseline) >= BASELINE:
                self.slow_ns = sorted(self._baseline)[BASELINE * 99 // 100]
                self._baseline = []
        if side == "candidate":
            self.requests += 1
        for name in self.metrics:
            self._count(_METRIC + name, side, bucket, bad=False)

    def forget_metrics(self) -> None:
        """The versions are others: their counters have begun anew."""
        self._values.clear()

    def metric(self, name: str, side: Side, value: float) -> None:
        """A counter of a version has this value: what was added since the last time are bad events."""
        last = self._values.get((name, side))
        self._values[name, side] = value
        counts = self._counts[_METRIC + name]
        if last is None or not counts.bad or not 0 < self._share < 100:
            return
        if not 0 < (more := value - last) < MOST_ADDED:  # a model may add infinity or NaN, too
            return
        more = round(more)
        counts.bad[-1].candidate += more if side == "candidate" else 0
        counts.bad[-1].stable += more if side == "stable" else 0

    def failed(self, side: Side, bucket: int) -> None:
        """A request has failed by the fault of the version."""
        self._count("errors", side, bucket, bad=True)
        if side == "candidate":
            self.requests += 1

    def compared(self, bucket: int, *, differs: bool) -> None:
        """The outputs of both versions for a request of the stable one were compared: a pair counts in every step."""
        counts = self._counts.get("outputs")
        if counts is None or not self._is_new("outputs", "candidate", bucket, bad=False):
            return
        if not counts.bad:
            counts.bad.append(BadEvents(1.0))
        counts.candidate += 1
        counts.bad[-1].candidate += differs

    def _count(self, name: str, side: Side, bucket: int, *, bad: bool) -> None:
        if self._share == 100:
            if name == "errors" and side == "candidate":
                self._alone.candidate += self._is_new(name, side, bucket, bad=False)
                self._alone.bad[0].candidate += bad and self._is_new(name, side, bucket, bad=True)
            return
        counts = self._counts.get(name)
        if counts is None or not counts.bad or not self._share:
            return
        if self._is_new(name, side, bucket, bad=False):
            counts.candidate += side == "candidate"
            counts.stable += side == "stable"
        if bad and self._is_new(name, side, bucket, bad=True):
            counts.bad[-1].candidate += side == "candidate"
            counts.bad[-1].stable += side == "stable"

    def _is_new(self, name: str, side: Side, bucket: int, *, bad: bool) -> bool:
        if not self._sticky:
            return True
        seen = self._seen.setdefault((name, side, bad), set())
        if bucket in seen:
            return False
        seen.add(bucket)
        return True

    def verdict(self) -> GuardVerdict | None:
        """Return what the guards say; None before the first event."""
        if self._share == 100:
            return judge_alone(self._alone, self._counts.get("errors")) if self._alone.candidate else None
        if not any(counts.candidate for counts in self._counts.values()):
            return None
        return together([judge(guard, self._counts[guard.name]) for guard in self._guards])

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the counts of both sides by guard."""
        return {
            name: {
                "candidate": counts.candidate,
                "candidate_bad": counts.candidate_bad,
                "stable": counts.stable,
                "stable_bad": counts.stable_bad,
            }
            for name, counts in self._counts.items()
        }


def judge_alone(alone: Counts, before: Counts | None) -> GuardVerdict:
    """Return the verdict at a share of 100 %, where the errors of the candidate are in `alone`.

    `before` has the errors of both versions in earlier steps. Without an earlier step, only a sure verdict passes.
    """
    if before is not None and before.stable:
        bound = 2 * (before.stable_bad + 3) / (before.stable + 3)  # few requests say little
        bound = min(_MOST_BOUND, max(_ALONE.at_most or 0, bound))
        found = judge(msgspec.structs.replace(_ALONE, at_most=bound), alone)
        return found if found.decision == "stop" else GuardVerdict("pass", found.sentence)
    found = judge(_ALONE, alone)
    if found.decision != "stop":
        return found
    above = judge(msgspec.structs.replace(_ALONE, at_most=_ALONE_UNKNOWN), alone)
    return above if above.decision == "stop" else GuardVerdict("inconclusive", found.sentence)


class SideObserver:
    """Gives the executions of one version to a trial. A `kernel.observe.statistics.ExecutionObserver`."""

    def __init__(self, trial: RolloutTrial, side: Side, is_comparable: Callable[[], bool]) -> None:
        """`is_comparable` returns whether both versions get their shares now: else their events do not count."""
        self._trial = trial
        self._side: Side = side
        self._is_comparable = is_comparable

    def executed(self, batch: Batch, times: ExecutionTimes) -> None:
        """Take the requests of a batch that have not failed."""
        if not self._is_comparable():
            return
        duration_ns = times.compute_end_ns - times.compute_start_ns
        for request in batch.requests:
            if not request.failed and (bucket := bucket_of_client(request)) >= 0:
                self._trial.executed(self._side, bucket, duration_ns)

    def composed(self, request: Request, duration_ns: int) -> None:
        """Take a request that an ensemble has executed."""
        if (bucket := bucket_of_client(request)) >= 0 and self._is_comparable():
            self._trial.executed(self._side, bucket, duration_ns)

    def failed(self, request: Request, error: ServingError) -> None:
        """Take a request that has failed, if that is the fault of the version."""
        if is_fault(error) and (bucket := bucket_of_client(request)) >= 0 and self._is_comparable():
            self._trial.failed(self._side, bucket)


def bucket_of_client(request: Request) -> int:
    """Return the bucket that has decided about a request; -1 if none has."""
    while request.parent is not None:
        request = request.parent
    return request.bucket


def is_fault(error: ServingError) -> bool:
    """Whether an error counts against a version: not what the client has done, nor full queues, quotas and waits."""
    return error.code in (ErrorCode.INTERNAL, ErrorCode.UNKNOWN) or isinstance(
        error, (WorkerLost, ExecutionTimeout, NoInstanceInTime, SequenceLost)
    )
