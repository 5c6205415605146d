"""Which CUDA graphs an optimization profile supports. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.worker.devices.graph_specs import GraphKey, graph_shapes

if TYPE_CHECKING:
    from backends.tensorrt.signature import EngineSignature, Profile
    from backends.worker.devices.graph_specs import GraphSpec


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
