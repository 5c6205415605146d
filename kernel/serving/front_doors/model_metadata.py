"""Model metadata as clients get it, over HTTP and gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, TensorSpec


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output; `shape` includes the batch dimension; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """The fields, in the order of the HTTP response."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def model_metadata(spec: ModelSpec, versions: Iterable[int]) -> ModelMetadata:
    """Describe a model; `versions` are the ready ones, or the requested one.

    Reshapes are not part of it. For a model without a platform, `platform` is the name of its backend.
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
