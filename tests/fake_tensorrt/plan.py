"""The engine format of the fake: a magic word, and JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

VERSION = "11.4.0.106"

MAGIC = b"FAKEPLAN"


class PlanTensor(msgspec.Struct, omit_defaults=True):
    name: str
    is_input: bool
    dtype: str
    shape: list[int]
    is_shape_tensor: bool = False
    on_host: bool = False
    format: str = "LINEAR"


class PlanFile(msgspec.Struct, omit_defaults=True):
    """An engine. `program` says for each output what it is: an operation, then the names of its inputs.

    Operations: `add`, `sub`, `identity`, `nonzero` (its shape depends on the values), `rows` (the number of rows of an
    input, on the host), `fill` (ones, in the shape that a shape tensor says), `total` (the sum of each row).
    """

    tensors: list[PlanTensor]
    program: dict[str, list[str]]
    #: For each profile: input → minimum, optimum, maximum of its dimensions.
    profiles: list[dict[str, list[list[int]]]] = msgspec.field(default_factory=lambda: [{}])
    #: The same for the values of shape tensors.
    values: list[dict[str, list[list[int]]]] = []
    version: str = VERSION
    capability: str = "9.0"
    version_compatible: bool = False
    any_device: bool = False
    #: For tests of builders: the settings.
    settings: dict[str, Any] = {}


def encode(plan: PlanFile) -> bytes:
    return MAGIC + msgspec.json.encode(plan)


def decode(data: bytes) -> PlanFile | None:
    """Return the engine; None for other bytes."""
    if not data.startswith(MAGIC):
        return None
    try:
        return msgspec.json.decode(data[len(MAGIC) :], type=PlanFile)
    except (msgspec.DecodeError, json.JSONDecodeError):
        return None
