"""Models with sequences: both strategies, iterative models, implicit state; ids that are used again, gaps, no END."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.transport import wire
from kernel import errors
from kernel.config.spec import SequenceBatching
from kernel.serving.sequence_model import SequenceModel
from kernel.testing import model_spec
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import register
from tests.simulation.plan import Action, ModelPlan, RequestPlan

if TYPE_CHECKING:
    from random import Random

    from kernel.serving.batch import Batch
    from kernel.serving.live_sequences import Sequence
    from tests.simulation.clients import Client
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.workers import SimulatedHandle, SimulatedWorker
    from tests.simulation.world import World

#: The flags of a request in messages to workers.
_START, _END = 1, 2


class SequenceKind:
    """`schedulers.sequence`."""

    name = "sequence"
    weight = 4

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        size = random.choice((0, 1, 2, 4))
        oldest = random.random() < 0.5
        batching = SequenceBatching(
            oldest=oldest,
            slot_count=random.choice((1, 2, 6)) if oldest else max(1, size),
            max_idle_ns=random.choice((1, 3, 20)) * draw.MS,
            max_queue_delay_ns=random.choice((0, 0, 200, 2_000)) * draw.US,
            minimum_slot_utilization=random.choice((0.0, 0.5, 1.0)),
            preferred_batch_sizes=(2,) if oldest and size > 2 and random.random() < 0.5 else (),
            iterative=random.random() < 0.2,
            has_state=random.random() < 0.5,
        )
        return [
            ModelPlan(
                kind=self.name,
                spec=model_spec(name, max_batch_size=size, dims=(1,), sequence_batching=batching),
                instances=random.choice((1, 1, 2, 3)),
                concurrency=random.choice((1, 1, 2)) if oldest else 1,
                execution_ns=random.choice(draw.EXECUTION_TIMES),
                failure_percent=random.choice((0, 0, 10)),
                restart_ns=random.choice((draw.MS, 10 * draw.MS)),
            )
        ]

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        found: list[Action] = []
        ids: list[int | str] = [*range(1, random.choice((2, 5, 10))), "text"]
        batching = plan.spec.sequence_batching
        for _ in range(random.choice((1, 4, 10))):
            found += self._sequence(random, plan, model, random.choice(ids), horizon_ns)
        if batching is not None and batching.iterative:
            found += draw.calls(random, plan, model, horizon_ns, rows=1, width=1, executions=random.randint(1, 3))
        return found

    def _sequence(
        self, random: Random, plan: ModelPlan, model: int, correlation_id: int | str, horizon_ns: int
    ) -> list[Action]:
        """Return the requests of one sequence."""
        count = random.choice((1, 2, 3, 8))
        at_ns = draw.time(random, draw.GRID_NS, horizon_ns)
        gaps_ns = random.choice(((0,), (draw.GRID_NS,), (0, 2 * draw.MS), (5 * draw.MS, draw.MS)))
        ends, starts = random.random() < 0.8, random.random() < 0.95
        found: list[Action] = []
        for number in range(count):
            wanted = draw.request(
                random,
                plan,
                rows=1,
                width=1,
                patience_ns=draw.time(random, draw.GRID_NS, 4 * draw.MS) if random.random() < 0.03 else None,
                follow_up=False,
                correlation_id=correlation_id,
                start=starts and not number,
                end=ends and number == count - 1,
                timeout_us=random.choice((0, 0, 0, 500, 5_000)),
                executions=random.randint(1, 3),
            )
            found.append(Action(at_ns, "submit", model, request=wanted))
            at_ns += random.choice(gaps_ns)
        return found

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return SequenceChecks(world, version)


class SequenceChecks(Checks):
    """A sequence has one slot of one instance, which executes its requests one by one, from START on."""

    def __init__(self, world: World, version: SimulatedVersion) -> None:
        super().__init__(world, version)
        assert self.spec.sequence_batching is not None
        self._batching = self.spec.sequence_batching
        assert isinstance(version.model, SequenceModel)
        self._live = version.model.sequences
        #: The request of each sequence that is dispatched and has no response.
        self._running: dict[Sequence, Client] = {}
        #: Where each sequence was last.
        self._places: dict[Sequence, tuple[str, int]] = {}

    def most_ahead(self) -> int:
        """Nothing is dispatched ahead of time: an instance has what it can execute."""
        return 1

    def in_order(self, clients: list[Client]) -> None:
        """Requests of one sequence are executed in their order, one at a time."""
        waiting = [client for client in self.queued() if client.settled]
        for client in clients:
            sequence = client.request.sequence
            assert sequence is not None
            for other in waiting:
                overtaken = other.request.sequence is sequence and other.order < client.order
                self.world.check(not overtaken, "%s overtakes %s of the same sequence", client, other)
            running = self._running.get(sequence)
            self.world.check(running is None, "%s is executed beside %s of the same sequence", client, running)
            self._running[sequence] = client

    def dispatched(self, handle: SimulatedHandle, batch: Batch) -> None:
        super().dispatched(handle, batch)
        world, slots = self.world, batch.slots
        if slots is None:
            world.check(False, "%s gets a batch without slots", handle.name)
            return
        world.check(len(slots) == len(batch.entries), "%s gets %s slots", handle.name, len(slots))
        world.check(len(set(slots)) == len(slots), "%s gets a slot twice: %s", handle.name, slots)
        for row, (slot, request) in enumerate(zip(slots, batch.entries, strict=True)):
            world.check(0 <= slot < self._batching.slot_count, "%s gets slot %s", handle.name, slot)
            world.check(self._batching.oldest or slot == row, "slot %s is in row %s", slot, row)
            if request is not None:
                assert request.sequence is not None
                place = (handle.name, slot)
                last = self._places.setdefault(request.sequence, place)
                moved = last != place and not self.version.workers_lost
                world.check(not moved, "%s is at %s, its sequence was at %s", request.id, place, last)
                self._places[request.sequence] = place

    def responded(self, client: Client, error: errors.ServingError | None) -> None:
        super().responded(client, error)
        sequence = client.request.sequence
        if sequence is not None and self._running.get(sequence) is client:
            del self._running[sequence]

    def lost(self, clients: list[Client]) -> None:
        for client in clients:
            sequence = client.request.sequence
            if sequence is not None:
                self._running.pop(sequence, None)

    # ---- what the model sees -----------------------------------------------------------------

    def received(self, worker: SimulatedWorker, message: wire.Execute) -> None:
        super().received(worker, message)
        for entry in message.requests:
            if entry.sequence is None or entry.sequence.empty:
                continue
            slot, wanted = entry.sequence.slot, entry.correlation_id
            if entry.flags & _START:
                worker.sequences[slot] = wanted
            found = worker.sequences.get(slot)
            self.world.check(found == wanted, "%s gets r%s in the slot of sequence %s", worker.title, entry.id, found)

    def message(self, worker: SimulatedWorker, message: wire.ToWorker) -> None:
        if isinstance(message, wire.EndSequence):
            self.world.check(self._batching.has_state, "%s has no state to free", worker.title)
            worker.sequences.pop(message.slot, None)  # absent if none of its requests was executed
        else:
            super().message(worker, message)

    def given_back(self, client: Client) -> None:
        """The model gave a request back."""
        assert client.request.sequence is not None
        self._running.pop(client.request.sequence, None)

    def may_refuse(self, plan: RequestPlan, error: errors.ServingError) -> bool:
        """A request without START belongs to a sequence that lives."""
        wanted = "must specify the START flag"
        return wanted in error.message and not plan.start and not self._live.has(plan.correlation_id)

    # ---- errors and waits --------------------------------------------------------------------

    def expected(self, client: Client, error: errors.ServingError) -> bool:
        same = [
            each
            for each in self.world.clients
            if each.model == client.model and each.plan.correlation_id == client.plan.correlation_id
        ]
        match error:
            case errors.SequenceLost():
                return self.version.workers_lost > 0
            case errors.SequenceTimeout():
                return any(each.plan.timeout_us for each in same) and not client.dispatches
            case errors.RequestCancelled():
                return any(each.has_left for each in same)
            case errors.InternalError(message=text) if text.startswith("the sequence ended before"):
                return self._batching.iterative
        return super().expected(client, error)

    def at_rest(self) -> None:
        if self.version.closed:
            return
        instances = [each for each in self.version.idle_handles() if not each.record.batches]
        serving = self.version.model.instances.serving
        for client in self.queued():
            sequence = client.request.sequence
            assert sequence is not None
            self.world.check(not client.has_left, "%s waits although its client has gone", client)
            if sequence.queue and sequence.queue[0] is client.request and sequence not in self._running:
                if sequence.instance is None:
                    free = [each for each in serving if self._live.on(each) < self._batching.slot_count]
                    self.world.check(not free, "%s waits for a slot, and there is one", client)
                elif sequence.instance in instances:
                    waited_ns = self.world.clock.time_ns - self.world.scenario.lateness_ns
                    waited_ns -= client.request.queue_start_ns
                    most_ns = self._batching.max_queue_delay_ns
                    self.world.check(waited_ns < most_ns, "%s waits, and its instance is idle", client)


register(SequenceKind())
