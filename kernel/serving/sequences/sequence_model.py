"""A loaded model version with sequences. A sequence stays with the version that has begun it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kernel.errors import ModelNotReady
from kernel.observe.repeats.limited_log import LimitedLog
from kernel.serving.model import Model
from kernel.serving.sequences.live_sequences import LiveSequences
from kernel.serving.sequences.sequence_instances import SequenceInstances

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError
    from kernel.loop.clock import Clock
    from kernel.serving.model import SchedulerFactory
    from kernel.serving.request import Request

#: A client may begin the same sequence again with each request.
_conflicts = LimitedLog(logging.getLogger(__name__), logging.WARNING)


def loaded_model(spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock) -> Model:
    """Return a new model version of the class that its configuration needs."""
    # A scheduler of a package makes its own sequences, if it wants to have any.
    kind = Model if spec.sequence_batching is None or spec.scheduler else SequenceModel
    return kind(spec, config, version, schedule, clock)


class SequenceModel(Model):
    """A loaded model version with sequences."""

    instances: SequenceInstances

    def __init__(
        self, spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock
    ) -> None:
        super().__init__(spec, config, version, schedule, clock)
        assert spec.sequence_batching is not None
        self.sequences = LiveSequences(spec.name, spec.sequence_batching)
        self.instances = SequenceInstances(self.inbox, self.live, self.statistics, clock, self.sequences)
        #: Versions that were replaced by this one, while they have sequences.
        self.former: list[SequenceModel] = []
        #: The version that has replaced this one.
        self._next: SequenceModel | None = None
        #: Only requests of live sequences are accepted.
        self._retired = False

    @property
    def live_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return len(self.sequences)

    @property
    def finishes_sequences(self) -> bool:
        """Whether the version was retired and still has sequences."""
        return self._retired and len(self.sequences) > 0

    @property
    def unfinished(self) -> str:
        """What `retire` waits for, for the log."""
        return f"{super().unfinished} and {len(self.sequences)} sequences"

    def follows(self, former: Model) -> None:
        """This version gets the requests of `former`, but not those of its live sequences."""
        if isinstance(former, SequenceModel) and former is not self:
            self.former = [each for each in (former, *former.former) if each is not self and each.sequences]
            former._next = self
            self.rule = self if self.former else None

    def continues(self, request: Request) -> bool:
        """Whether `request` belongs to a sequence that lives."""
        return not request.sequence_start and self.owner_of(request).sequences.has(request.correlation_id)

    def submit(self, request: Request) -> None:
        """Queue a checked request in the version that has its sequence. Raises `ServingError`."""
        owner = self.owner_of(request) if self.former or self._retired else self
        owner.submit_own(request)

    def submit_own(self, request: Request) -> None:
        """Queue a checked request in this version. Raises `ServingError`."""
        if self._failure is None:
            self._admit(request)
        super().submit(request)

    def choose(self, request: Request) -> SequenceModel:
        """See `kernel.serving.front_doors.route.RouteRule`."""
        return self.owner_of(request)

    def choose_for(self, request: Request, parent: Request) -> SequenceModel:
        """See `kernel.serving.front_doors.route.RouteRule`."""
        return self.owner_of(request)

    def owner_of(self, request: Request) -> SequenceModel:
        """Return the version for `request`: this one, or an earlier one if that has the request's sequence."""
        correlation_id = request.correlation_id
        if self.sequences.has(correlation_id):
            return self
        if self._retired and self._next is not None:
            return self._next.owner_of(request)
        if not request.sequence_start:
            self.former = [former for former in self.former if former.sequences]
            for former in self.former:
                if former.sequences.has(correlation_id) and request.model_version in ("", former.version_text):
                    return former
        return self

    def _admit(self, request: Request) -> None:
        if self._retired and not self.sequences.has(request.correlation_id):
            raise ModelNotReady(self.name, self.version)
        if self.sequences.admit(request):
            _conflicts.log(
                f"model '{self.name}'",
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                request.correlation_id, self.name,
            )  # fmt: skip

    # ---- the end -----------------------------------------------------------------------------

    async def retire(self) -> None:
        """Begin no new sequence, and wait until all sequences and requests have ended."""
        self._retired = True
        while self.sequences or self.live:
            await self.drain()
            await self.instances.all_ended()

    def abandon(self, error: ServingError) -> None:
        super().abandon(error)
        self.sequences.clear()

    def _scheduler_failed(self, error: Exception) -> None:
        """End all sequences, whose queues the scheduler had, and go on as `Model` does."""
        self.sequences.clear()
        self.instances.finished.clear()
        super()._scheduler_failed(error)
