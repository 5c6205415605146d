"""Model metadata as clients read it, over HTTP and gRPC alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, TensorSpec


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output; `shape` has the batch dimension and -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """Fields and their order are those of the HTTP answer."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def model_metadata(spec: ModelSpec, versions: Iterable[int]) -> ModelMetadata:
    """Describe a model; `versions` are those that are ready, or the one that was asked for.

    Reshapes are the model's own affair and do not show. A model without a platform has its backend's name.
    """
    return ModelMetadata(
        name=spec.name,
        versions=tuple(str(version) for version in versions),
        platform=spec.platform or spec.backend,
        inputs=tuple(_tensor_metadata(tensor) for tensor in spec.inputs.values()),
        outputs=tuple(_tensor_metadata(tensor) for tensor in spec.outputs.values()),
    )


def _tensor_metadata(tensor: TensorSpec) -> TensorMetadata:
    return TensorMetadata(tensor.name, tensor.datatype, tensor.shape)
