"""Models whose clients are served in turn: weights, quotas, with and without dynamic batching."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from kernel import errors
from kernel.config.fair_queuing import FairQueuing
from kernel.config.spec import DynamicBatching
from kernel.testing import model_spec
from schedulers.queue import client_of
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import register
from tests.simulation.plan import Action, ModelPlan

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.clients import Client
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World

_TENANTS = ("gold", "silver", "other", "")


class Fair:
    """`naiad.fair_by` with the dynamic batcher, or without batching."""

    name = "fair"
    weight = 2

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        size = random.choice((0, 1, 4, 8))
        spec = model_spec(name, max_batch_size=size, dims=(1,), dynamic_batching=DynamicBatching() if size else None)
        by_header = random.random() < 0.5
        fair = FairQueuing(
            header="tenant" if by_header else "",
            parameter="" if by_header else "tenant",
            weights={"gold": random.choice((1.0, 4.0)), "silver": random.choice((0.5, 2.0))},
            quotas={"gold": random.choice((0, 3))},
            default_quota=random.choice((0, 0, 4)),
        )
        return [
            ModelPlan(
                kind=self.name,
                spec=msgspec.structs.replace(spec, fair=fair),
                instances=random.choice((1, 1, 2)),
                execution_ns=random.choice(draw.EXECUTION_TIMES),
                failure_percent=random.choice((0, 0, 10)),
            )
        ]

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        found: list[Action] = []
        for tenant in random.sample(_TENANTS, random.randint(1, 4)):
            found += draw.calls(
                random, plan, model, horizon_ns, width=1, parameters={"tenant": tenant} if tenant else {}
            )
        return found

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return FairChecks(world, version)


class FairChecks(Checks):
    """Between two clients that both wait, the rows served by weight differ by at most a request of each."""

    def __init__(self, world: World, version: SimulatedVersion) -> None:
        super().__init__(world, version)
        assert self.spec.fair is not None
        self._fair = self.spec.fair
        self._most_rows = max(1, self.spec.max_batch_size)
        #: What each client got, in rows divided by its weight.
        self._served: dict[str, float] = {}
        #: For two clients that both wait: the difference of what they had got when the second began to wait.
        self._apart: dict[tuple[str, str], float] = {}
        self._counts: dict[str, int] = {}

    def most_ahead(self) -> int:
        """Nothing is dispatched ahead of time: it would wait outside of the queue."""
        return 1

    def tenant(self, client: Client) -> str:
        return client_of(client.request, self._fair)

    def submitted(self, client: Client) -> None:
        super().submitted(client)
        self._counts[self.tenant(client)] = self._counts.get(self.tenant(client), 0) + 1

    def responded(self, client: Client, error: errors.ServingError | None) -> None:
        super().responded(client, error)
        self._counts[self.tenant(client)] -= 1

    def expected(self, client: Client, error: errors.ServingError) -> bool:
        if isinstance(error, errors.QuotaExceeded):
            tenant = self.tenant(client)
            return 0 < self._fair.quota(tenant) < self._counts[tenant]
        return super().expected(client, error)

    def in_order(self, clients: list[Client]) -> None:
        """Each client's requests are served in their order, and no client gets more than its share."""
        waiting = [client for client in self.queued() if client.settled]
        for served in clients:
            tenant = self.tenant(served)
            for other in waiting:
                overtaken = self.tenant(other) == tenant and other.order < served.order
                self.world.check(not overtaken, "%s overtakes %s of the same client", served, other)
        for number, served in enumerate(clients):
            if served.dispatches == 1:  # one that came back was charged before
                self._charge(served, [*clients[number + 1 :], *waiting])

    def _charge(self, served: Client, waiting: list[Client]) -> None:
        tenant, fair = self.tenant(served), self._fair
        others = {self.tenant(each) for each in waiting if not each.dispatches} - {tenant}
        still = {pair for pair in self._apart if set(pair) <= others | {tenant}}
        self._apart = {pair: apart for pair, apart in self._apart.items() if pair in still}
        for pair in itertools.combinations(sorted(others | {tenant}), 2):
            if pair not in self._apart:
                self._apart[pair] = self._served.get(pair[0], 0) - self._served.get(pair[1], 0)
        self._served[tenant] = self._served.get(tenant, 0) + served.request.batch_size / fair.weight(tenant)
        for pair, before in self._apart.items():
            apart = self._served.get(pair[0], 0) - self._served.get(pair[1], 0) - before
            most = sum(self._most_rows / fair.weight(each) for each in pair)
            self.world.check(abs(apart) <= 2 * most, "%s got %s more than %s, by weight", pair[0], apart, pair[1])


register(Fair())
