"""For which shapes CUDA graphs are captured, and which batches may use them. Pure. For backends with graphs.

A CUDA graph repeats one execution with fixed shapes and addresses, in one call of the driver. Rules and texts are those
of Triton's TensorRT backend (`optimization.cuda`), except that a lower bound applies to the batch dimension only: where
another dimension is smaller than in the graph, the rows of the inputs would lie at other places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from backends.base import Config
    from backends.worker.devices.tensors import DeviceArray

#: The batch sizes of graphs of a model without preferred batch sizes.
_DEFAULT_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)

#: Input → shape with the batch dimension, in the order of the names.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class GraphSpec(msgspec.Struct, frozen=True):
    """A graph that the configuration asks for."""

    #: In rows; 0 if the model does not batch.
    batch_size: int
    #: Input → shape without the batch dimension.
    shapes: dict[str, tuple[int, ...]] = {}
    #: The fewest rows that use the graph.
    lower_batch_size: int = 0
    lower_shapes: dict[str, tuple[int, ...]] = {}


class GraphKey(msgspec.Struct, frozen=True):
    """The shapes that a graph was captured with."""

    shapes: Shapes
    #: The most and the fewest rows; both are 0 if the model does not batch.
    row_count: int = 0
    lower_row_count: int = 0


def graph_specs(config: Config) -> list[GraphSpec]:
    """Return the graphs to capture, none if the configuration does not ask for graphs. Raises `InvalidArgument`."""
    cuda: Mapping[str, Any] = config.get("optimization", {}).get("cuda", {})
    if not cuda.get("graphs", False):
        return []
    max_batch_size = int(config.get("max_batch_size", 0))
    given = cuda.get("graph_spec", [])
    if not given:
        return [GraphSpec(size, {}, size, {}) for size in _default_sizes(config, max_batch_size)]
    specs = [_spec(entry) for entry in given]
    for spec in specs:
        _check(spec, max_batch_size)
    return specs


def has_ignored_lower_bounds(specs: Iterable[GraphSpec]) -> bool:
    """Whether a lower bound has smaller dimensions than its graph, apart from the batch dimension."""
    return any(spec.lower_shapes != spec.shapes for spec in specs)


def graph_shapes(spec: GraphSpec, inputs: Mapping[str, tuple[int, ...]], batched: bool) -> Shapes | str:
    """Return the shapes of a graph, or a text that says why it cannot be captured.

    `inputs` are the dimensions of the model's, with the batch dimension; -1 for a variable one.
    """
    shapes = []
    for name, dims in sorted(inputs.items()):
        given = spec.shapes.get(name)
        if given is not None:
            shape = (spec.batch_size, *given) if batched else given
        else:
            shape = (spec.batch_size, *dims[1:]) if batched and dims[:1] == (-1,) else dims
        if -1 in shape:
            return f"the graph specification has no dimensions for input '{name}', which has variable dimensions"
        shapes.append((name, shape))
    return tuple(shapes)


def best_graph(keys: Sequence[GraphKey], shapes: Shapes) -> int | None:
    """Return the position of the graph for a batch of these shapes: the one with the fewest rows too many; or None."""
    best: int | None = None
    for position, key in enumerate(keys):
        if key.shapes == shapes:
            return position
        if _covers(key, shapes) and (best is None or key.row_count < keys[best].row_count):
            best = position
    return best


def _covers(key: GraphKey, shapes: Shapes) -> bool:
    """Whether the graph computes the batch in its first rows."""
    if not key.row_count or len(key.shapes) != len(shapes):
        return False
    for (name, graph_shape), (given_name, shape) in zip(key.shapes, shapes, strict=True):
        if name != given_name or graph_shape[1:] != shape[1:] or not shape:
            return False
        if graph_shape[0] != shape[0] and (
            graph_shape[0] != key.row_count or not key.lower_row_count <= shape[0] <= key.row_count
        ):
            return False
    return True


def _default_sizes(config: Config, max_batch_size: int) -> list[int]:
    if not max_batch_size:
        return [0]
    sequences = config.get("sequence_batching", {})
    if "dynamic_batching" in config:
        sizes = {1, *map(int, config["dynamic_batching"].get("preferred_batch_size", []))}
    elif "oldest" in sequences:
        sizes = {1, *map(int, sequences["oldest"].get("preferred_batch_size", []))}
    else:
        sizes = set(_DEFAULT_BATCH_SIZES)
    return sorted(size for size in {*sizes, max_batch_size} if size <= max_batch_size)


def _spec(entry: Mapping[str, Any]) -> GraphSpec:
    size, shapes = int(entry.get("batch_size", 0)), _dims(entry.get("input", {}))
    bound = entry.get("graph_lower_bound")
    if bound is None:
        return GraphSpec(size, shapes, size, shapes)
    return GraphSpec(size, shapes, int(bound.get("batch_size", 0)), _dims(bound.get("input", {})))


def _dims(inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    # Protobuf's JSON writes 64-bit integers as strings.
    return {name: tuple(int(dim) for dim in shape.get("dim", [])) for name, shape in inputs.items()}


def _check(spec: GraphSpec, max_batch_size: int) -> None:
    sizes = (spec.batch_size, spec.lower_batch_size)
    if not max_batch_size and any(sizes):
        raise InvalidArgument("graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0")
    if max_batch_size and not all(1 <= size <= max_batch_size for size in sizes):
        raise InvalidArgument(f"graph spec expects 'batch_size' to be >= 1 and <= {max_batch_size}")
    if spec.lower_batch_size > spec.batch_size:
        raise InvalidArgument("graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'")
    for name, shape in spec.shapes.items():
        if name not in spec.lower_shapes:
            raise InvalidArgument(f"graph lower bound spec expects shape for input '{name}'")
        lower = spec.lower_shapes[name]
        if len(lower) != len(shape):
            raise InvalidArgument(f"graph lower bound spec expects to have '{len(shape)} dimensions, got {len(lower)}")
        for low, size in zip(lower, shape, strict=True):
            if min(low, size) < 0:
                raise InvalidArgument(f"graph spec expects input '{name}' to have dimension >= 0")
            if low > size:
                raise InvalidArgument(f"graph lower bound spec expects input '{name}' to have dimension <= {size}")


def key_of_captured(key: GraphKey, outputs: Iterable[DeviceArray]) -> GraphKey:
    """Return the key of a graph that was captured for `key`, and has these outputs.

    If an output has not one row for each row of the batch, only batches of exactly these shapes may use the graph.
    """
    if all(output.shape[:1] == (key.row_count,) for output in outputs):
        return key
    return GraphKey(key.shapes, key.row_count, key.row_count)


def outputs_of_batch(
    key: GraphKey, inputs: Mapping[str, DeviceArray], outputs: dict[str, DeviceArray]
) -> dict[str, DeviceArray]:
    """Return the graph's outputs without the rows that the batch with `inputs` does not have."""
    count = max((array.shape[0] for array in inputs.values() if array.ndim), default=0)
    if key.row_count in (0, count):
        return outputs
    return {name: output[:count] for name, output in outputs.items()}
