"""Compares the outputs of a trial with the model's configuration, which is what clients are promised. Pure.

The server sends outputs as the model made them, as Triton does; so a model that breaks its configuration serves, and
its clients fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, TensorSpec


#: Backends that leave dimensions of 1 out of their outputs' shapes, as Triton's do.
_WITHOUT_ONES = ("fil",)


class SentOutput(msgspec.Struct, frozen=True):
    """An output of a response, as the client would get it."""

    name: str
    datatype: str
    shape: list[int]


def departures(spec: ModelSpec, responses: Iterable[Iterable[SentOutput]]) -> list[str]:
    """Return a line for each output in which the responses depart from the configuration.

    A model may leave an output out of a response; one that no response has departs. `responses` are those to requests
    that named no outputs.
    """
    seen: set[str] = set()
    lines: dict[str, str] = {}
    for response in responses:
        for output in response:
            seen.add(output.name)
            expected = spec.outputs.get(output.name)
            if expected is not None and spec.backend in _WITHOUT_ONES:
                expected = _without_ones(expected)
            line = _departure(output, expected) if expected is not None else _unknown(output.name, spec)
            if line:
                lines.setdefault(output.name, line)
    for name in spec.outputs:
        if name not in seen:
            lines[name] = (
                f"output '{name}' is in the configuration, but no response has it: correct the name in the "
                "model, or in config.pbtxt"
            )
    return list(lines.values())


def _without_ones(expected: TensorSpec) -> TensorSpec:
    batch, dims = expected.shape[: len(expected.shape) - len(expected.dims)], expected.dims
    return msgspec.structs.replace(expected, shape=(*batch, *(dim for dim in dims if dim != 1)))


def _departure(output: SentOutput, expected: TensorSpec) -> str:
    if output.datatype != expected.datatype:
        return (
            f"output '{output.name}' is {output.datatype}, but the configuration says {expected.datatype}: change the "
            "model, or data_type in config.pbtxt"
        )
    shape = expected.shape
    fits = len(shape) == len(output.shape) and all(
        dim in (-1, size) for dim, size in zip(shape, output.shape, strict=False)
    )
    if not fits and expected.reshape is None and not expected.is_shape_tensor:
        return (
            f"output '{output.name}' has shape {output.shape}, but the configuration says {list(shape)}: change the "
            "model, or dims in config.pbtxt"
        )
    return ""


def _unknown(name: str, spec: ModelSpec) -> str:
    there = ", ".join(f"'{each}'" for each in spec.outputs) or "none"
    return f"output '{name}' is not in the configuration, which has {there}"
