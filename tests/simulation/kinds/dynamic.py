"""Models with the dynamic batcher: preferred sizes, delays, priorities, queue policies, shapes that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors
from kernel.config.spec import DynamicBatching, QueuePolicy
from kernel.testing import model_spec
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import register
from tests.simulation.plan import Action, ModelPlan

if TYPE_CHECKING:
    from random import Random

    from kernel.serving.batch import Batch
    from tests.simulation.clients import Client
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.workers import SimulatedHandle
    from tests.simulation.world import World


class Dynamic:
    """`schedulers.dynamic`."""

    name = "dynamic"
    weight = 5

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        size = random.choice((1, 2, 4, 8))
        decoupled = random.random() < 0.1
        return [
            ModelPlan(
                kind=self.name,
                spec=model_spec(
                    name,
                    max_batch_size=size,
                    dims=(-1,),
                    dynamic_batching=_batching(random, size, ordered=not decoupled and random.random() < 0.25),
                    decoupled=decoupled,
                ),
                instances=random.choice((1, 1, 2, 3)),
                concurrency=random.choice((1, 1, 1, 2)),
                execution_ns=random.choice(draw.EXECUTION_TIMES),
                failure_percent=random.choice((0, 0, 10)),
                restart_ns=random.choice((draw.MS, 10 * draw.MS)),
                autoscale=draw.autoscale(random),
            )
        ]

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        count = random.choice((3, 8, 15, 30))
        return [
            Action(
                at_ns,
                "submit",
                model,
                request=draw.request(
                    random,
                    plan,
                    priority=random.choice((0, 0, 1, 2, 3, 7)),
                    timeout_us=random.choice((0, 0, 100, 1_000, 100_000)),
                ),
            )
            for at_ns in draw.arrivals(random, horizon_ns, count)
        ]

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return DynamicChecks(world, version)


def _batching(random: Random, size: int, *, ordered: bool) -> DynamicBatching:
    levels = random.choice((0, 0, 2, 3))
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted({random.randint(1, size) for _ in range(random.choice((0, 0, 1, 2)))})),
        max_queue_delay_ns=random.choice((0, 0, 50, 100, 500, 2_000, 10_000)) * draw.US,
        preserve_ordering=ordered,
        priority_levels=levels,
        default_priority_level=random.randint(1, levels) if levels else 0,
        default_queue_policy=_policy(random),
        queue_policies={level: _policy(random) for level in range(1, levels + 1) if random.random() < 0.4},
    )


def _policy(random: Random) -> QueuePolicy:
    return QueuePolicy(
        delay_on_timeout=random.random() < 0.4,
        default_timeout_ns=random.choice((0, 0, 100, 500, 3_000)) * draw.US,
        allow_timeout_override=random.random() < 0.5,
        max_queue_size=random.choice((0, 0, 0, 1, 3, 8)),
    )


class DynamicChecks(Checks):
    """The order of levels and time-outs, the bounds of queues, and when a batch must not wait any longer."""

    def __init__(self, world: World, version: SimulatedVersion) -> None:
        super().__init__(world, version)
        assert self.spec.dynamic_batching is not None
        self.batching = self.spec.dynamic_batching
        self._most_rows = max(1, self.spec.max_batch_size)
        self._preferred = self.batching.preferred_batch_sizes
        #: Whether the queue had as many requests as a full batch has rows, before the last batch was taken from it.
        self._enough_for_full = False
        #: Whether one of the requests that the queue had then could have expired there.
        self._may_expire = False
        #: Requests that were dispatched and have no response yet, in the order of their responses.
        self._places: list[Client] = []

    def most_ahead(self) -> int:
        """A fast model gets one batch ahead of time, so that others can grow, and any number of those that cannot; less
        beyond limits, and none while a request may expire."""
        if self.batching.limits_waiting:
            most = max(2, 1 + super().most_ahead() // 5) if self._enough_for_full else 2
            return 1 if self._may_expire else min(most, super().most_ahead())
        return super().most_ahead() if self._enough_for_full else min(2, super().most_ahead())

    def dispatched(self, handle: SimulatedHandle, batch: Batch) -> None:
        self._enough_for_full = len(batch.requests) + len(self.queued()) >= self._most_rows
        waiting = [*map(self.world.client_of, batch.requests), *(each for each in self.queued() if each.settled)]
        now_ns = self.world.clock.time_ns
        self._may_expire = any((self.expires_ns(client) or 0) > now_ns for client in waiting)
        super().dispatched(handle, batch)
        if self.batching.preserve_ordering:
            for request in batch.requests:
                client = self.world.client_of(request)
                if client.dispatches == 1 and not client.is_inner:
                    self._places.append(client)

    def delivered(self, client: Client) -> None:
        """With `preserve_ordering`, responses come in the order in which requests were dispatched first."""
        super().delivered(client)
        if client in self._places:
            first = self._places[0]
            self._places.remove(client)
            in_order = first is client or self.version.planned_failures > 0  # a new scheduler begins a new order
            self.world.check(in_order, "%s gets its response before %s", client, first)

    # ---- the queue ---------------------------------------------------------------------------

    def level(self, client: Client) -> int:
        """Return the priority level of a request."""
        number = client.plan.priority
        return number if 0 < number <= self.batching.priority_levels else self.batching.default_priority_level

    def policy(self, client: Client) -> QueuePolicy:
        return self.batching.queue_policy(self.level(client))

    def expires_ns(self, client: Client) -> int | None:
        """Return when a request that waits is rejected or put behind the others."""
        policy = self.policy(client)
        timeout_ns = policy.default_timeout_ns
        own_ns = client.plan.timeout_us * 1000
        if policy.allow_timeout_override and 0 < own_ns < timeout_ns:
            timeout_ns = own_ns
        return client.request.queue_start_ns + timeout_ns if timeout_ns else None

    def rank(self, client: Client) -> tuple[int, ...]:
        """Level by level; in a level those in time, then those whose time is over, as they expired."""
        expires_ns = self.expires_ns(client)
        if expires_ns is None or self.world.clock.time_ns < expires_ns:
            return (self.level(client), 0, 0, client.order)
        if self.world.scenario.lateness_ns:  # several that expired one after the other are found together
            return (self.level(client), 1)
        return (self.level(client), 1, max(expires_ns, client.queued_ns), client.order)

    def expected(self, client: Client, error: errors.ServingError) -> bool:
        policy = self.policy(client)
        if isinstance(error, errors.QueueTimeout):
            expires_ns = self.expires_ns(client)
            in_time = expires_ns is None or self.world.clock.time_ns < expires_ns
            return not policy.delay_on_timeout and not in_time and client.version is self.version
        if isinstance(error, errors.QueueFull):
            level = self.level(client)
            others = sum(self.level(each) == level for each in self.queued())
            return bool(policy.max_queue_size) and others >= policy.max_queue_size
        return super().expected(client, error)

    def at_rest(self) -> None:
        super().at_rest()
        if self.version.closed:
            return
        now_ns = self.world.clock.time_ns - self.world.scenario.lateness_ns
        for client in self.queued():
            expires_ns = self.expires_ns(client)
            late = expires_ns is not None and expires_ns <= now_ns and not self.policy(client).delay_on_timeout
            self.world.check(not late, "%s waits although its time is over", client)

    # ---- batches -----------------------------------------------------------------------------

    def key(self, client: Client) -> tuple[int, ...]:
        """Requests with different keys cannot share a batch."""
        return tuple(client.request.inputs[0].shape[1:])

    def in_order(self, clients: list[Client]) -> None:
        super().in_order(clients)
        keys = {self.key(client) for client in clients}
        self.world.check(len(keys) == 1, "%s have different shapes and share a batch", clients)

    def reason_to_wait(self, queued: list[Client]) -> str:
        """A batch that can still grow waits until its oldest request has waited for the delay."""
        delay_ns = self.batching.max_queue_delay_ns
        rows, oldest_ns, most = 0, self.world.clock.time_ns, max(self._preferred, default=self._most_rows)
        clients = sorted(queued, key=self.rank)
        for client in clients:
            more = client.request.batch_size
            if self.key(client) != self.key(clients[0]) or rows + more > self._most_rows:
                return ""  # it cannot grow
            if rows and rows + more > most:
                return ""  # it is better without this one
            rows += more
            oldest_ns = min(oldest_ns, client.request.queue_start_ns)
            if rows in self._preferred or rows >= most:
                return ""
        waited_ns = self.world.clock.time_ns - self.world.scenario.lateness_ns - oldest_ns
        return "it may grow" if delay_ns and waited_ns < delay_ns else ""


register(Dynamic())
