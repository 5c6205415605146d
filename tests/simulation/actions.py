"""What can happen from outside, by name: clients, operators, and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.plan import Action
    from tests.simulation.versions import SimulatedInstance
    from tests.simulation.world import World


def submit(world: World, action: Action) -> None:
    """A client sends a request."""
    assert action.request is not None
    world.submit(action.model, action.request)


def cancel(world: World, action: Action) -> None:
    """The client of some unanswered request disconnects."""
    waiting = [client for client in world.clients if client.waits and not client.left]
    if waiting:
        waiting[action.pick % len(waiting)].leave()


def kill(world: World, action: Action) -> None:
    """A worker dies."""
    if instance := _instance(world, action):
        instance.lose("exit code 1")


def kill_all(world: World, action: Action) -> None:
    """All workers of a model die, and the next restarts fail."""
    world.failing_restarts = action.pick % 4
    for version in world.versions:
        if version.index == action.model:
            for instance in version.instances:
                instance.lose("killed by signal 9 (SIGKILL)")


def pause(world: World, action: Action) -> None:
    """A worker's process is stopped by a signal for some time."""
    if instance := _instance(world, action):
        instance.pause(action.duration_ns)


def reload(world: World, action: Action) -> None:
    """The model is loaded again."""
    if not world.draining:
        world.tell("%s is loaded again", world.scenario.models[action.model].spec.name)
        world.load(action.model)


def unload(world: World, action: Action) -> None:
    """The model is unloaded, and loaded after some time."""
    if world.draining:
        return
    name = world.scenario.models[action.model].spec.name
    world.tell("%s is unloaded", name)
    world.unload(action.model)

    def load() -> None:
        if world.serving[action.model] is None and not world.draining:
            world.tell("%s is loaded", name)
            world.load(action.model)

    world.after(action.duration_ns, load)


def grow(world: World, action: Action) -> None:
    """The model gets an instance."""
    version = world.serving[action.model]
    if version is not None and not world.draining:
        world.tell("%s gets an instance", version.title)
        version.grow(action.duration_ns)


def shrink(world: World, action: Action) -> None:
    """The model loses an instance, which finishes its batches."""
    version = world.serving[action.model]
    if version is None or world.draining:
        return
    left = [each for each in version.instances if not each.retired]
    if len(left) > 1:
        instance = left[action.pick % len(left)]
        world.tell("%s is removed", instance.name)
        version.retired = version.retired or world.scenario.impatient_unload
        world.start_task(world.retirement.end_instance(instance))  # type: ignore[arg-type]  # what it uses of a keeper


def fail_scheduler(world: World, action: Action) -> None:
    """The scheduler of a model raises at its next event."""
    version = world.serving[action.model]
    if version is not None:
        world.tell("the scheduler of %s will fail", version.title)
        version.fails_next = True


def drain(world: World, action: Action) -> None:
    """The server stops."""
    if not world.draining:
        world.tell("the server stops")
        world.drain()


def abandon(world: World, action: Action) -> None:
    """The server cannot wait any longer."""
    if not world.abandoned:
        world.tell("the server exits")
        world.abandon()


def _instance(world: World, action: Action) -> SimulatedInstance | None:
    """Return an instance of the model with a living worker."""
    found = [
        instance
        for version in world.versions
        if version.index == action.model
        for instance in version.instances
        if instance.worker is not None
    ]
    return found[action.pick % len(found)] if found else None


ACTIONS: dict[str, Callable[[World, Action], None]] = {
    each.__name__: each
    for each in (
        submit, cancel, kill, kill_all, pause, reload, unload, grow, shrink, fail_scheduler, drain, abandon,
    )
}  # fmt: skip
