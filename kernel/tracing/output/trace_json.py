"""Traces in Triton's JSON: several objects for each trace, which have its id. Pure.

Triton writes BYTES with quotes around each element that are not escaped twice; here each element is a JSON string, so
that the whole is JSON in any case. Elements that Triton does not write (FP16, BF16) are numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.tracing.output.tensor_text import tensor_text
from kernel.tracing.trace import BACKEND_OUTPUT, COMPUTE_OUTPUT_START, QUEUE_INPUT, QUEUE_START, REQUEST_START

if TYPE_CHECKING:
    from kernel.tracing.trace import TracedTensor, TraceRecord

_encode = msgspec.json.Encoder().encode

#: The tensors of an activity stand behind the first of this.
_AFTER = {QUEUE_INPUT: QUEUE_START, BACKEND_OUTPUT: COMPUTE_OUTPUT_START}


def trace_json(record: TraceRecord) -> bytes:
    """Return the objects of a trace, in the order of time, with commas between them."""
    waiting = {activity: [each for each in record.tensors if each.activity == activity] for activity in _AFTER}
    objects: list[dict[str, Any]] = []
    for name, at_ns in record.pairs():
        if name == REQUEST_START:
            objects.append(_description(record))
        objects.append({"id": record.id, "timestamps": [{"name": name, "ns": at_ns}]})
        for activity, after in _AFTER.items():
            if name == after:
                objects += (_tensor(record, each) for each in waiting.pop(activity, ()))
    for tensors in waiting.values():
        objects += (_tensor(record, each) for each in tensors)
    return b",\n".join(map(_encode, objects))


def _description(record: TraceRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": record.id, "model_name": record.model_name, "model_version": record.model_version,
    }  # fmt: skip
    if record.request_id:
        found["request_id"] = record.request_id
    if record.parent_id:
        found["parent_id"] = record.parent_id
    if record.error:
        found["error"] = record.error
    return found


def _tensor(record: TraceRecord, tensor: TracedTensor) -> dict[str, Any]:
    data, note = tensor_text(tensor)
    found: dict[str, Any] = {
        "name": tensor.name, "data": data, "shape": ",".join(map(str, tensor.shape)), "dtype": tensor.datatype,
    }  # fmt: skip
    if note:
        found["note"] = note
    return {"id": record.id, "activity": tensor.activity, "tensor": found}
