"""Instance groups of a configuration → the instances to start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.repository.host_policy import policy_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.serving.instances import Instance
    from kernel.serving.model import Model


class InstancePlan(msgspec.Struct, frozen=True):
    """One model instance: what a worker is told when it loads the model."""

    name: str
    model_dir: str
    version: int
    kind: str = "CPU"
    device_id: int = 0
    #: Name of the host policy, and the CPUs that it allows; none for all.
    host_policy: str = ""
    cpus: tuple[int, ...] = ()
    #: Whether the instance is only loaded and executes nothing.
    passive: bool = False
    #: Settings of the backend from the command line.
    backend_config: dict[str, str] = {}


class InstanceKeeper(Protocol):
    """Keeps one instance alive in a worker. Implemented by `backends.supervision.supervisor.InstanceSupervisor`."""

    async def start(self, title: str) -> None:
        """Start a worker process, without a model yet. Raises `ServingError`."""

    async def complete(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        """Return the configuration as the model file completes it, in JSON. Raises `ServingError`."""

    async def load(self, plan: InstancePlan, config: str) -> int:
        """Load the model; returns the nanoseconds that it took. Raises `ServingError`."""

    def join(self, model: Model) -> Instance:
        """Make the instance one of `model`'s and keep it alive from now on. Returns it.

        It is apart from the others: until `serve`, it executes only what it is given itself.
        """

    def serve(self) -> None:
        """Let the instance take batches of its model."""

    def set_restart_config(self, config: str) -> None:
        """Have a worker that must be started again load this configuration."""

    async def retire(self) -> None:
        """Take no more batches, and wait until what was taken is done. A worker that dies is not replaced."""

    async def stop(self, *, at_once: bool = False) -> None:
        """Finalize the model and end the worker; `at_once` only ends it."""


def plan_instances(config: ModelConfig, model_dir: str, version: int) -> list[InstancePlan]:
    """Return one plan per instance of a normalised configuration, named `<group>_<number>` (Triton).

    A group on several GPUs has `count` instances on each of them.
    """
    plans: list[InstancePlan] = []
    for group in config.instance_group:
        kind = _KINDS[group.kind]
        for number in range(group.count):
            plans += [
                InstancePlan(
                    name=f"{group.name}_{number}",
                    model_dir=model_dir,
                    version=version,
                    kind=kind,
                    device_id=device,
                    host_policy=policy_name(group, kind, device),
                    passive=group.passive,
                )
                for device in (group.gpus if kind == "GPU" else [0])
            ]
    return plans


def match_instances(old: Sequence[InstancePlan], new: Sequence[InstancePlan]) -> list[int | None]:
    """Return for each new instance the index of the old one that stays in its place, None for one to start.

    What has the same name stays first. Then, as in Triton, what differs in nothing but the name; it keeps
    the one it has, so it must not be the name of another.
    """
    free = list(range(len(old)))
    names = {plan.name for plan in new}

    def take(plan: InstancePlan, *, named_otherwise: bool) -> int | None:
        for index in free:
            other = old[index]
            if named_otherwise and other.name not in names:
                other = msgspec.structs.replace(other, name=plan.name)
            if other == plan:
                free.remove(index)
                return index
        return None

    found = [take(plan, named_otherwise=False) for plan in new]
    return [
        take(plan, named_otherwise=True) if index is None else index for plan, index in zip(new, found, strict=True)
    ]


#: ModelInstanceGroup.Kind; AUTO was resolved when the configuration was normalised.
_KINDS = {1: "GPU", 2: "CPU", 3: "MODEL"}
