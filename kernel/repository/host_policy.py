"""The option --host-policy: which CPUs the workers of an instance group may use.

Instance groups refer to a policy by its name; a group without a name has the policy of its kind. Error texts
are Triton's (command_line_parser.cc, numa_utils.cc). Like Triton, most errors appear when an instance is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import InternalError, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.generated.model_config_pb2 import ModelInstanceGroup

#: Policy name → its settings.
HostPolicies = dict[str, dict[str, str]]

_NUMA_NODE = "numa-node"
_CPU_CORES = "cpu-cores"

#: The folder in which Linux lists the CPUs of each NUMA node.
_NODES = Path("/sys/devices/system/node")


def parse_host_policies(values: Iterable[str]) -> HostPolicies:
    """Parse the values of --host-policy: `NAME,SETTING=VALUE`. Raises `InvalidArgument` or `Unsupported`."""
    policies: HostPolicies = {}
    for value in values:
        name, comma, rest = value.partition(",")
        setting, equals, chosen = rest.partition("=")
        if not (name and comma and setting and equals and chosen):
            raise InvalidArgument(f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {value}")
        if setting not in (_NUMA_NODE, _CPU_CORES):
            raise Unsupported(
                f"Unsupported host policy setting '{setting}' is specified, supported settings are "
                f"'{_NUMA_NODE}', '{_CPU_CORES}'"
            )
        policies.setdefault(name, {})[setting] = chosen
    return policies


def policy_name(group: ModelInstanceGroup, kind: str, device: int) -> str:
    """Return the name of a group's policy for an instance of `kind` (CPU, GPU or MODEL) on GPU `device`."""
    return group.host_policy or (f"gpu_{device}" if kind == "GPU" else kind.lower())


def policy_cpus(policy: dict[str, str], nodes: Path = _NODES) -> tuple[int, ...]:
    """Return the CPUs that a policy allows, ascending; an empty tuple allows all. Reads files below `nodes`: blocks.

    `numa-node` allows the CPUs of that node, because Linux places a page in the node of the CPU that first
    touches it. `cpu-cores` overrides `numa-node`. Raises `ServingError`.
    """
    if _CPU_CORES in policy:
        return _parse_cores(policy[_CPU_CORES])
    if _NUMA_NODE in policy:
        return _cpus_of_node(_integer(policy[_NUMA_NODE], _NUMA_NODE), nodes)
    return ()


def _parse_cores(text: str) -> tuple[int, ...]:
    """Return the CPUs of `LOWER-UPPER[,LOWER-UPPER]...`."""
    cpus: set[int] = set()
    for part in text.split(","):
        lower, dash, upper = part.partition("-")
        if not dash:
            raise InvalidArgument(
                f"host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got {part}"
            )
        # Linux has fewer than 65536 CPUs; the limit keeps the set small.
        cpus.update(range(_integer(lower, _CPU_CORES), min(_integer(upper, _CPU_CORES), 1 << 16) + 1))
    return tuple(sorted(cpus))


def _integer(text: str, setting: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidArgument(f"Parsing '{setting}' value: Can't parse '{text}' to integer")
    return int(text)


def _cpus_of_node(node: int, nodes: Path) -> tuple[int, ...]:
    if not nodes.is_dir():
        return ()  # the machine has no NUMA nodes
    try:
        listed = (nodes / f"node{node}" / "cpulist").read_text()
    except OSError:
        raise InternalError("Unable to set NUMA memory policy: Invalid argument") from None
    ranges = [part if "-" in part else f"{part}-{part}" for part in listed.strip().split(",") if part]
    return _parse_cores(",".join(ranges)) if ranges else ()
