"""`ModelConfig` → the JSON of /config, which Python models and workers receive too, and the text of a config.pbtxt.

The format of the JSON is Triton 2.51's: every field without presence that it knows is written, in the order of the
.proto file. Enums are written as names, 64-bit integers as numbers. Three 64-bit fields stay strings, as in Triton. The
text is for people: without the defaults that every server fills in.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from kernel.config.generated.model_config_pb2 import (
    DESCRIPTOR,
    ModelConfig,
    ModelOptimizationPolicy,
    ModelVersionPolicy,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

_encoder = msgspec.json.Encoder()

_MODEL_CONFIG = DESCRIPTOR.message_types_by_name["ModelConfig"]

_INT64_TYPES = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)

#: 64-bit fields that Triton's ModelConfigToJson does not turn into numbers (core: model_config_utils.cc).
_LEFT_AS_STRINGS = frozenset(
    {
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    }
)


#: Fields that Triton 2.51 does not have: they are written only where they are set, so that an ensemble without them has
#: the same JSON.
_NEWER = frozenset({"inference.ModelEnsembling.max_inflight_requests"})


def to_json(config: ModelConfig) -> str:
    """Return the compact JSON text of /config."""
    return _encoder.encode(to_dict(config)).decode()


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `to_json` as a dict of plain values. It shares no object with `config`."""
    return _message(_MODEL_CONFIG, config)


def _message(descriptor: Descriptor, message: Message) -> dict[str, Any]:
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in _in_order(descriptor)
        if (message.HasField(field.name) if field.has_presence else _is_written(field, message))
    }


def _is_written(field: FieldDescriptor, message: Message) -> bool:
    return field.full_name not in _NEWER or bool(getattr(message, field.name))


def _in_order(descriptor: Descriptor) -> list[FieldDescriptor]:
    """Return the fields in the order of the .proto file, with the scalars of a `oneof` last, as in Triton."""
    return sorted(
        descriptor.fields,
        key=lambda field: field.containing_oneof is not None and field.message_type is None,
    )


def _field(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Mapping):  # as `_is_map` of `kernel/config/load.py`: protobuf imports a module to tell
        assert field.message_type is not None
        entry = field.message_type.fields_by_name["value"]
        # A protobuf map has no order; a sorted one makes the text reproducible.
        return {str(key): _single(entry, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_single(field, each) for each in value]
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _message(field.message_type, value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _number(_shortest_float32(value))
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return _number(value)
    if field.type in _INT64_TYPES and field.full_name in _LEFT_AS_STRINGS:
        return str(value)
    return value


def _number(value: float) -> float | int | str:
    """Return `value` as Triton writes it: a whole number without a fraction, NaN and infinity as text."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # Above 15 digits protobuf writes an exponent, and JSON readers then see a fraction.
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _shortest_float32(value: float) -> float:
    """Return a 32-bit float with as few digits as protobuf writes: 0.1 for 0.10000000149011612."""
    short = float(f"{value:.6g}")
    if struct.pack("f", short) == struct.pack("f", value):
        return short
    return float(f"{value:.9g}")


def to_pbtxt(config: ModelConfig) -> str:
    """Return the text of a completed configuration. A server completes it to `config` again.

    Left out are the version policy `latest: 1`, pinned memory, and names of instance groups that follow from places.
    """
    shown = ModelConfig()
    shown.CopyFrom(config)
    if shown.version_policy == ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1)):
        shown.ClearField("version_policy")
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if getattr(shown.optimization, field).enable:
            shown.optimization.ClearField(field)
    if shown.optimization == ModelOptimizationPolicy():
        shown.ClearField("optimization")
    for index, group in enumerate(shown.instance_group):
        if group.name == f"{config.name}_{index}":
            group.ClearField("name")
    return text_format.MessageToString(shown, use_short_repeated_primitives=True)
