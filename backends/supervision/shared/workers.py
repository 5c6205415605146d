"""The shared workers of a server by name (`naiad.worker`), and which instances may be in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.supervision.shared.process import SharedProcess
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from backends.supervision.launcher import Launcher
    from backends.supervision.output.limits import OutputLimits
    from kernel.repository.placement import InstancePlan


class SharedWorkers:
    """Gives each name its process, as a `Launcher`. Processors are a property of a process: all members have the same.

    An instance is known by its keeper, not by its name: a reloaded model has instances with the same names.
    """

    def __init__(self, launcher: Launcher, limits: OutputLimits) -> None:
        self._launcher = launcher
        self._limits = limits
        self._processes: dict[str, SharedProcess] = {}
        #: Name → instances that load or are loaded, by their keepers.
        self._members: dict[str, dict[object, InstancePlan]] = {}

    def launcher(self, name: str) -> Launcher:
        """Return what starts workers of the models that share the worker `name`."""
        if name not in self._processes:
            self._processes[name] = SharedProcess(name, self._launcher, self._limits)
        return self._processes[name]

    def join(self, keeper: object, plan: InstancePlan) -> None:
        """Count an instance, which is about to load. Raises `Unsupported` if it cannot be with those that are there."""
        process = self._processes.get(plan.needs.worker)
        if process is not None:
            process.check(plan.name, plan.needs)
        members = self._members.setdefault(plan.needs.worker, {})
        for other in members.values():
            if other.cpus != plan.cpus:
                raise Unsupported(
                    f"model instance '{plan.name}' cannot share worker '{plan.needs.worker}' (parameter naiad.worker) "
                    f"with '{other.name}': their host policies '{plan.host_policy}' and '{other.host_policy}' give "
                    f"them different processors ({_cpus(plan.cpus)} and {_cpus(other.cpus)})"
                )
        members[keeper] = plan

    def leave(self, keeper: object, plan: InstancePlan) -> None:
        """Count an instance no longer."""
        members = self._members.get(plan.needs.worker, {})
        members.pop(keeper, None)
        if not members:
            self._members.pop(plan.needs.worker, None)


def _cpus(cpus: tuple[int, ...]) -> str:
    return ", ".join(map(str, cpus)) or "all"
