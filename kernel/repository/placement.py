"""Instance groups of a configuration → the instances to start. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.config.model_parameters import model_parameters
from kernel.repository.host_policy import policy_name
from kernel.repository.worker_needs import NO_NEEDS, PreloadSet, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model


#: The backends whose instances on a GPU can be threads of one process (`Backend.shares_worker_on_gpu`). The kernel
#: imports no backend.
THREADED_ON_GPUS = frozenset({"onnxruntime"})


class InstancePlan(msgspec.Struct, frozen=True):
    """One model instance, as the `Load` message describes it to a worker."""

    name: str
    model_dir: str
    version: int
    kind: str = "CPU"
    device_id: int = 0
    host_policy: str = ""
    #: The CPUs that the host policy allows; empty for all.
    cpus: tuple[int, ...] = ()
    #: For GPU: the memory for gathered inputs and for tensors to other models that the instance keeps, in bytes.
    device_pool_byte_size: int = 0
    #: The instance is loaded, but never executes.
    passive: bool = False
    #: What the rate limiter asks of it, serialised: an instance keeps its needs, so that what its batches have taken is
    #: what they give back. Other needs are another instance, as in Triton.
    rate_limiter: bytes = b""
    #: The backend's settings from the command line.
    backend_config: dict[str, str] = {}
    needs: WorkerNeeds = NO_NEEDS


class InstanceKeeper(Protocol):
    """Keeps one instance alive in a worker. Implemented by `backends.supervision.supervisor.InstanceSupervisor`."""

    #: Gets a text if the start of a worker takes long: what it waits for, for the repository index. The loader sets it.
    pending: Callable[[str], None]

    async def start(self, title: str, needs: WorkerNeeds) -> None:
        """Start a worker process without a model. Raises `ServingError`."""

    async def complete(
        self, config: str, model_dir: str, version: int, backend_config: dict[str, str], *, verify: bool = False
    ) -> str:
        """Return the configuration as the backend completes it from the model file, in JSON. Raises `ServingError`.

        With `verify` the files are checked against `config`, which is complete, and is returned.
        """

    async def gpu_obstacle(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        """Return why the model's backend cannot compute on a GPU as it is installed; "" if it can.

        Raises `ServingError`.
        """

    async def load(self, plan: InstancePlan, config: str, together: int = 1) -> int:
        """Load the model and return the duration in nanoseconds. Raises `ServingError`.

        `together` instances of the model are loaded at the same time; they share what the server has for it.
        """

    def demanded_ns(self) -> int | None:
        """Return how long the worker has used a processor or waited for one; None if that is not known."""

    def join(self, model: Model) -> Instance:
        """Add the instance to `model`, apart from the others, and restart its worker from now on if it dies.

        Until `serve`, the scheduler does not use the instance; it executes only `InstanceSet.dispatch_to`.
        """

    def serve(self) -> None:
        """Let the scheduler dispatch batches to the instance."""

    def set_restart_config(self, config: str) -> None:
        """Use this configuration when the worker is started again."""

    async def retire(self, limit_s: float) -> None:
        """Take no more batches, and wait until the dispatched ones have ended. A worker that dies is not replaced.

        After `limit_s` seconds the worker is killed, and its requests fail.
        """

    async def released(self, limit_s: float) -> None:
        """Wait until no other model uses a tensor on the instance's device, which goes with its worker.

        At most `limit_s` seconds. To be called after the last request.
        """

    async def stop(self, *, at_once: bool = False) -> None:
        """Finalize the model and end the worker. `at_once` ends the worker without finalizing the model."""


def plan_instances(
    config: ModelConfig, model_dir: str, version: int, scaled_count: int | None = None
) -> list[InstancePlan]:
    """Return one plan per instance of a normalised configuration, named `<group>_<number>` as in Triton.

    A group on several GPUs has `count` instances on each of them. `scaled_count`, if given, takes the place of the
    count of the group that is not passive (`naiad.autoscale`).
    """
    plans: list[InstancePlan] = []
    for group in config.instance_group:
        kind = _KINDS[group.kind]
        count = group.count if scaled_count is None or group.passive else scaled_count
        for number in range(count):
            plans += [
                InstancePlan(
                    name=f"{group.name}_{number}",
                    model_dir=model_dir,
                    version=version,
                    kind=kind,
                    device_id=device,
                    host_policy=policy_name(group, kind, device),
                    passive=group.passive,
                    rate_limiter=group.rate_limiter.SerializeToString(),
                )
                for device in (group.gpus if kind == "GPU" else [0])
            ]
    return plans


def share_workers_on_gpus(plans: Sequence[InstancePlan], config: ModelConfig, load_number: int) -> list[InstancePlan]:
    """Return the plans, with one process for the instances of the model on a GPU if its backend can do it.

    Only where there are several of them, or may be. A model has processes of its own if its configuration chooses the
    process (`naiad.worker`), or asks for something that only a process of one instance can have. `load_number` counts
    the loads of the server: a version that is loaded again gets other processes, so that what is wrong with it does not
    end the instances that still serve.
    """
    if config.backend not in THREADED_ON_GPUS:
        return list(plans)
    counts = Counter((plan.device_id, plan.host_policy) for plan in plans if plan.kind == "GPU")
    ours = model_parameters(config)
    found = []
    for plan in plans:
        needs, policy = plan.needs, plan.host_policy
        own = needs.environment is not None or needs.memory_limit_byte_size or needs.preload != PreloadSet()
        several = ours.autoscale is not None or counts[plan.device_id, policy] > 1
        if plan.kind == "GPU" and several and not (needs.worker or own or ours.isolates_poison):
            place = f"gpu_{plan.device_id}" + (f":{policy}" if policy != f"gpu_{plan.device_id}" else "")
            # With colons, which the parameter naiad.worker does not allow.
            worker = f"{config.name}:{plan.version}:{place}:{load_number}"
            plan = msgspec.structs.replace(plan, needs=msgspec.structs.replace(needs, worker=worker))
        found.append(plan)
    return found


def match_instances(old: Sequence[InstancePlan], new: Sequence[InstancePlan]) -> list[int | None]:
    """Return for each new plan the index of the old instance that is kept for it, or None to start a new instance.

    Equal plans match first. Then, as in Triton, plans that differ only in the name match. Such an instance keeps
    its old name, which therefore must not be the name of another new plan.
    """
    unmatched = list(range(len(old)))
    names = {plan.name for plan in new}

    def take(plan: InstancePlan, *, ignore_name: bool) -> int | None:
        for index in unmatched:
            other = old[index]
            if ignore_name and other.name not in names:
                other = msgspec.structs.replace(other, name=plan.name)
            if other == plan:
                unmatched.remove(index)
                return index
        return None

    found = [take(plan, ignore_name=False) for plan in new]
    return [take(plan, ignore_name=True) if index is None else index for plan, index in zip(new, found, strict=True)]


#: Names of ModelInstanceGroup.Kind. KIND_AUTO is absent, because normalising replaces it.
_KINDS = {1: "GPU", 2: "CPU", 3: "MODEL"}
