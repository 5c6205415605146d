"""What must hold for every model, whatever its scheduler.

Kinds of models extend `Checks` by what their schedulers promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors

if TYPE_CHECKING:
    from backends.transport import wire
    from kernel.serving.batch import Batch
    from tests.simulation.clients import Client
    from tests.simulation.plan import RequestPlan
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.workers import SimulatedHandle, SimulatedWorker
    from tests.simulation.world import World


class Checks:
    """The checks of one loaded version. Failures go to `World.check`, which ends the run."""

    def __init__(self, world: World, version: SimulatedVersion) -> None:
        self.world = world
        self.version = version
        self.spec = version.plan.spec

    # ---- hooks -------------------------------------------------------------------------------

    def submitted(self, client: Client) -> None:
        """The version took a request; it may have been dispatched or answered already."""

    def may_refuse(self, plan: RequestPlan, error: errors.ServingError) -> bool:
        """Whether there is a reason to refuse a request with `error`."""
        return False

    def lost(self, clients: list[Client]) -> None:
        """The instance of these requests is lost."""

    def given_back(self, client: Client) -> None:
        """The model gave a request back, to execute it again."""

    def dispatched(self, handle: SimulatedHandle, batch: Batch) -> None:
        """The scheduler gives a batch to an instance. Its requests are not queued any more."""
        world, requests = self.world, batch.requests
        rows = sum(request.batch_size for request in requests)
        most = max(1, self.spec.max_batch_size)
        clients = [world.client_of(request) for request in requests]
        world.tell("%s gets %s (%s of %s rows)", handle.name, clients, rows, most)
        world.check(bool(batch.entries), "%s gets an empty batch", handle.name)
        world.check(rows <= most, "%s gets %s rows, its limit is %s", handle.name, rows, most)
        world.check(len(set(clients)) == len(clients), "a request is twice in a batch: %s", clients)
        world.check(self.version.is_serving(handle), "%s gets a batch and is not in service", handle.name)
        for client in clients:
            world.check(client.version is self.version or client.version is None, "%s is not for this model", client)
            world.check(not client.ended, "%s is dispatched after its final response", client)
            client.dispatched_ns = world.clock.now_ns()
            client.dispatches += 1
        ahead = len(handle.record.batches) - handle.record.concurrency
        world.check(ahead < self.most_ahead(), "%s gets batch number %s ahead of time", handle.name, ahead + 1)
        self.in_order(clients)

    def most_ahead(self) -> int:
        """Return how many batches an instance may have, less those that it executes, plus 1."""
        return max(self.version.model.instances._depth, 2 if self.is_about_to_end() else 1)

    def is_about_to_end(self) -> bool:
        """Whether the only instance, of a model that is not fast, is expected to end its batch soon."""
        instances = self.version.model.instances
        next_ns = instances._next_batch_ns
        if next_ns is None or instances._calls or self.version.plan.needs is not None:
            return False
        return instances.count == 1 and self.world.clock.time_ns >= next_ns

    def in_order(self, clients: list[Client]) -> None:
        """Check that no queued request should have come before the dispatched ones: first come, first served."""
        ranks = [self.rank(client) for client in clients]
        self.world.check(ranks == sorted(ranks), "a batch is not in order: %s", clients)
        waiting = min(((self.rank(each), each.number) for each in self.queued() if each.settled), default=None)
        if waiting is not None and ranks:
            self.world.check(ranks[-1] <= waiting[0], "%s overtake r%s", clients, waiting[1])

    def rank(self, client: Client) -> tuple[int, ...]:
        """Return the place of a request in the order of service."""
        return (client.order,)

    def queued(self) -> list[Client]:
        """Return the clients whose requests are queued."""
        return [self.world.client_of(request) for request in self.version.model.live.queued_requests()]

    def received(self, worker: SimulatedWorker, message: wire.Execute) -> None:
        """A worker gets a batch."""
        for request in message.requests:
            for tensor in request.inputs:
                if tensor.span is not None:
                    number = tensor.span.lease.region_number
                    self.world.check(number in worker.attached, "%s does not know region %s", worker.title, number)

    def message(self, worker: SimulatedWorker, message: wire.ToWorker) -> None:
        """A worker gets another message. Default: it must not."""
        self.world.check(type(message).__name__ in ("Credit", "FreeBlocks"), "%s gets %s", worker.title, message)

    def executed(self, worker: SimulatedWorker, message: wire.Execute) -> None:
        """A worker has executed a batch and is about to respond."""

    def delivered(self, client: Client) -> None:
        """A client got its final response."""

    def responded(self, client: Client, error: errors.ServingError | None) -> None:
        """The model gave the final response to a request, perhaps an error."""
        if error is not None and not self.expected(client, error):
            self.world.check(False, "%s got an error without a reason: %s", client, error.message)

    def expected(self, client: Client, error: errors.ServingError) -> bool:
        """Whether there was a reason for an error."""
        world, version = self.world, self.version
        match error:
            case errors.RequestCancelled():
                return client.has_left
            case errors.WorkerLost():
                return version.workers_lost > 0 and client.dispatches > 0
            case errors.NotFinishedInTime():
                return world.scenario.impatient_unload and version.retired
            case errors.ServerStopping():
                return world.abandoned or world.draining
            case errors.Unavailable(message=text) if text.startswith("no instance of model"):
                return version.restarts_failed > 0 and not version.model.instances.count
            case errors.Unavailable(message=text) if text.startswith("Server exiting"):
                return world.abandoned
            case errors.InternalError(message=text) if "failed: as planned" in text:
                return version.planned_failures > 0
            case errors.InternalError(message=text):
                return text == "the model failed on purpose" and version.plan.failure_percent > 0
        return False

    def at_rest(self) -> None:
        """All that could be done at this time was done: what still waits must have a reason."""
        if self.version.closed:
            return
        queued = self.queued()
        if queued:
            gone = [client for client in queued if client.has_left]
            self.world.check(not gone, "%s wait although their clients have gone", gone)
            for handle in self.version.idle_handles():
                reason = self.reason_to_wait(queued)
                self.world.check(bool(reason), "%s is idle, and %s wait", handle.name, queued)

    def reason_to_wait(self, queued: list[Client]) -> str:
        """Return why `queued` wait although an instance is idle; empty if there is no reason."""
        return ""

    def at_end(self) -> None:
        """Nothing happens any more."""
