"""Which optimization profile a batch runs with: the nearest of those that support its shapes. Pure.

Triton's TensorRT backend has the same texts.

Which CUDA graphs an optimization profile supports. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.worker.devices.graph_specs import GraphKey, graph_shapes
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import Config
    from backends.tensorrt.signature import EngineSignature, Profile
    from backends.worker.devices.graph_specs import GraphSpec

    #: The name of a profile in the configuration, and its index in the engine.
    NamedProfile = tuple[str, int]


#: The name of the first profile, for instance groups that name none.
_DEFAULT = "default"


def group_of(config: Config, instance_name: str) -> Mapping[str, Any]:
    """Return the instance group of an instance: the one whose name its name begins with, as in `GROUP_0`.

    Without such a group the first one, which `complete` and `verify` use, too.
    """
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or [{}]
    fitting = [each for each in groups if instance_name.rpartition("_")[0] == each.get("name", "")]
    fitting += [each for each in groups if instance_name == each.get("name")]
    return fitting[0] if fitting else groups[0]


def instance_profiles(config: Config, instance_name: str, profile_count: int) -> list[NamedProfile]:
    """Return the profiles that an instance has a context for, without repetitions, ascending by index.

    Raises `InvalidArgument` for a profile that the engine does not have.
    """
    names: list[str] = list(group_of(config, instance_name).get("profile", ()))
    found: dict[int, str] = {}
    for name in names or [_DEFAULT]:
        index = 0 if not names else _index_of(name)
        if not 0 <= index < profile_count:
            raise InvalidArgument(
                f"Can not set the specified optimization profile {name}[{index}] for {instance_name or config['name']}."
                f" Expected optimization profile index range 0-{profile_count - 1}"
            )
        found.setdefault(index, name)
    return [(name, index) for index, name in sorted(found.items())]


def profiles_of_groups(config: Config, profile_count: int) -> list[int]:
    """Return the indexes of the profiles of all instance groups. Raises `InternalError` for an unknown one."""
    names = [name for group in config.get("instance_group", []) for name in group.get("profile", [])]
    for name in names:
        if not 0 <= _index_of(name) < profile_count:
            raise InternalError(
                f"unable to autofill for '{config['name']}', configuration specified invalid profile {name} . "
                f"Number of profiles supported by TensorRT engine: {profile_count}"
            )
    return sorted({_index_of(name) for name in names} or {0})


def _index_of(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise InvalidArgument(f"unable to parse '{name}': stoi") from None


def choose_profile(
    candidates: Sequence[tuple[str, Profile]],
    shapes: Mapping[str, Sequence[int]],
    values: Mapping[str, Sequence[int]],
) -> int:
    """Return the position in `candidates` of the profile that supports the inputs and whose optimum is nearest.

    `candidates` are the profiles of the instance with their names, `shapes` those of the whole batch, `values` those
    of shape tensors. The distance is the sum of the differences of all dimensions and values. If the only profile does
    not fit, the error says which dimension is wrong. Raises `InvalidArgument`.
    """
    if len(candidates) == 1:
        return 0
    best, shortest = -1, 0
    for position, (_, profile) in enumerate(candidates):
        if misfit(profile, shapes, values) is not None:
            continue
        distance = _distance(profile, shapes, values)
        if best < 0 or distance < shortest:
            best, shortest = position, distance
    if best < 0:
        listed = "".join(f" {name}[{profile.index}]" for name, profile in candidates)
        raise InvalidArgument(
            f"failed to find any Optimization Profile among [{listed}] to support the requested dimensions "
            "(or shape values)"
        )
    return best


def check_fits(
    profile: Profile, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Sequence[int]], instance_name: str
) -> None:
    """Raise `InvalidArgument` if the profile does not support the inputs of a batch."""
    found = misfit(profile, shapes, values)
    if found is not None:
        name, reason = found
        raise InvalidArgument(
            f"request specifies invalid shape for input '{name}' for {instance_name}. Error details: {reason}"
        )


def misfit(
    profile: Profile, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Sequence[int]]
) -> tuple[str, str] | None:
    """Return the first input that the profile does not support, and the reason; None if it supports all."""
    for name, shape in shapes.items():
        extent = profile.dims.get(name)
        if extent is None:
            continue
        if len(shape) != len(extent.maximum):
            return name, f"model expected {len(extent.maximum)} dimensions but received {len(shape)} dimensions"
        for index, (size, low, high) in enumerate(zip(shape, extent.minimum, extent.maximum, strict=True)):
            if not low <= size <= high:
                return name, (
                    f"model expected the shape of dimension {index} to be between {low} and {high} but received {size}"
                )
    for name, given in values.items():
        extent = profile.values.get(name)
        if extent is None:
            continue
        if len(given) != len(extent.maximum):
            return name, (
                f"mismatch between the number of shape values. Expecting {len(extent.maximum)}. Got {len(given)}"
            )
        for index, (value, low, high) in enumerate(zip(given, extent.minimum, extent.maximum, strict=True)):
            if not low <= value <= high:
                return name, (
                    f"The shape value at index {index} is expected to be in range from {low} to {high}, Got: {value}"
                )
    return None


def _distance(profile: Profile, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Sequence[int]]) -> int:
    total = 0
    for given, extents in ((shapes, profile.dims), (values, profile.values)):
        for name, numbers in given.items():
            if name in extents:
                total += sum(abs(a - b) for a, b in zip(numbers, extents[name].optimum, strict=True))
    return total


def graph_key(spec: GraphSpec, signature: EngineSignature, profile: Profile, batched: bool) -> GraphKey | str:
    """Return the shapes of a graph, or a text that says why it cannot be captured with the profile."""
    shapes = graph_shapes(spec, {name: tensor.dims for name, tensor in signature.inputs.items()}, batched)
    if isinstance(shapes, str):
        return shapes
    for name, shape in shapes:
        extent = profile.dims[name]
        if len(shape) != len(extent.maximum) or not all(
            low <= size <= high for low, size, high in zip(extent.minimum, shape, extent.maximum, strict=True)
        ):
            return f"optimization profile {profile.index} does not support shape {list(shape)} of input '{name}'"
    return GraphKey(shapes, spec.batch_size, spec.lower_batch_size)
