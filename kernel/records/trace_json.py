"""Traces in Triton's JSON: several objects for each trace, which have its id. Pure.

Triton writes BYTES with quotes around each element that are not escaped twice; here each element is a JSON string, so
that the whole is JSON in any case. Elements that Triton does not write (FP16, BF16) are numbers.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.records.front_doors import FRONT_DOOR_NAMES
from kernel.records.trace import (
    BACKEND_OUTPUT,
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_INPUT,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    RESPONSE_COMPLETE,
    TraceRecord,
)

if TYPE_CHECKING:
    from kernel.records.trace import TracedTensor, UsualRequest, UsualTrace

#: Datatype → the letter of `struct`, and the byte size of an element.
_FORMATS = {
    "BOOL": ("B", 1), "UINT8": ("B", 1), "UINT16": ("H", 2), "UINT32": ("I", 4), "UINT64": ("Q", 8),
    "INT8": ("b", 1), "INT16": ("h", 2), "INT32": ("i", 4), "INT64": ("q", 8),
    "FP16": ("e", 2), "BF16": ("H", 2), "FP32": ("f", 4), "FP64": ("d", 8),
}  # fmt: skip

#: How many digits always suffice to tell two numbers of a type apart.
_DIGITS = {"FP16": 5, "BF16": 4, "FP32": 9}

#: The most elements that are shown.
_MOST_ELEMENTS = 1024


def tensor_text(tensor: TracedTensor) -> tuple[str, str]:
    """Return the elements, with commas between them, and a note where some are missing; else an empty note."""
    if tensor.cut:
        return "", f"{tensor.byte_size} bytes, left out with later tensors: too many bytes of tensors are traced"
    if not tensor.data and tensor.byte_size:
        return "", f"{tensor.byte_size} bytes in shared memory, which the traces of the composing models show"
    if tensor.datatype == "BYTES":
        texts, whole = _strings(tensor.data)
    else:
        texts, whole = _numbers(tensor.datatype, tensor.data)
    if whole and len(tensor.data) >= tensor.byte_size and len(texts) <= _MOST_ELEMENTS:
        return ",".join(texts), ""
    del texts[_MOST_ELEMENTS:]
    return ",".join(texts), f"the first {len(texts)} elements of {tensor.byte_size} bytes"


def _strings(data: bytes) -> tuple[list[str], bool]:
    """Return BYTES elements as JSON strings, and whether the last one is complete."""
    texts: list[str] = []
    position = 0
    while position + 4 <= len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        if position + 4 + length > len(data):
            return texts, False
        texts.append(json.dumps(data[position + 4 : position + 4 + length].decode(errors="backslashreplace")))
        position += 4 + length
    return texts, position == len(data)


def _numbers(datatype: str, data: bytes) -> tuple[list[str], bool]:
    letter, byte_size = _FORMATS[datatype]
    count = min(len(data) // byte_size, _MOST_ELEMENTS + 1)
    numbers = struct.unpack(f"<{count}{letter}", data[: count * byte_size])
    if datatype == "BF16":
        numbers = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(number << 16 for number in numbers)))
    if datatype in _DIGITS:
        most = _DIGITS[datatype]
        return [_short(number, letter if datatype != "BF16" else "", most) for number in numbers], True
    return [str(number).removesuffix(".0") for number in numbers], True


def _short(number: float, letter: str, most: int) -> str:
    """Return a short text for a number that has fewer than 64 bits: as Triton's with six digits if that is exact."""
    text = f"{number:.{min(6, most)}g}"
    if letter and math.isfinite(number):
        try:
            exact = struct.unpack(f"<{letter}", struct.pack(f"<{letter}", float(text)))[0] == number
        except OverflowError:  # the text is larger than the largest number
            exact = False
        if not exact:
            return f"{number:.{most}g}"
    return text


_encode = msgspec.json.Encoder().encode

#: The tensors of an activity stand behind the first of this.
_AFTER = {QUEUE_INPUT: QUEUE_START, BACKEND_OUTPUT: COMPUTE_OUTPUT_START}


def trace_json(trace: TraceRecord | UsualTrace) -> bytes:
    """Return the objects of a trace, in the order of time, with commas between them."""
    if isinstance(trace, TraceRecord):
        return _record_json(trace)
    request, id, sent_ns = trace.request, trace.request.id, trace.send_end_ns
    start_ns, queued_ns, end_ns = request.request_start_ns, request.queue_start_ns, request.request_end_ns
    compute_ns, input_ns, output_ns, computed_ns = request.execution_ns
    begin_ns, received_ns = _reception(request)
    if not (begin_ns <= received_ns <= start_ns <= queued_ns <= compute_ns <= computed_ns <= end_ns <= sent_ns):
        return _record_json(record_of(trace))  # the clock of a worker on another host is known to some microseconds
    request_id = b',"request_id":%b' % _encode(request.request_id) if request.request_id else b""
    return _usual_template(request.door, *request.model) % (
        id, begin_ns, id, received_ns, id, request_id, id, start_ns, id, queued_ns, id, compute_ns, id, input_ns,
        id, output_ns, id, computed_ns, id, end_ns, id, end_ns, id, end_ns, id, sent_ns,
    )  # fmt: skip


def _reception(request: UsualRequest) -> tuple[int, int]:
    """Return when the request began and ended to come."""
    begin_ns = request.receive_start_ns or request.request_start_ns
    return begin_ns, request.receive_end_ns or begin_ns


def record_of(trace: UsualTrace) -> TraceRecord:
    """Return the same trace with names."""
    request = trace.request
    end_ns = request.request_end_ns
    times = (
        *_reception(request), request.request_start_ns, request.queue_start_ns, *request.execution_ns,
        end_ns, end_ns, end_ns, trace.send_end_ns,
    )  # fmt: skip
    pairs = zip(_usual_names(request.door), times, strict=True)
    return TraceRecord(request.id, 0, *request.model, request.request_id, [part for pair in pairs for part in pair])


def _usual_names(door: int) -> tuple[str, ...]:
    """Return the activities of a usual trace, in the order of its times."""
    names = FRONT_DOOR_NAMES[door]
    return (
        names.receive_start, names.receive_end, REQUEST_START, QUEUE_START, COMPUTE_START, COMPUTE_INPUT_END,
        COMPUTE_OUTPUT_START, COMPUTE_END, RESPONSE_COMPLETE, REQUEST_END, names.send_start, names.send_end,
    )  # fmt: skip


@functools.lru_cache(256)
def _usual_template(door: int, model_name: str, model_version: int) -> bytes:
    """Return the objects of a usual trace with places for its numbers, and for its request id."""
    activities = [b'{"id":%%d,"timestamps":[{"name":"%b","ns":%%d}]}' % name.encode() for name in _usual_names(door)]
    name = _encode(model_name).replace(b"%", b"%%")
    description = b'{"id":%%d,"model_name":%b,"model_version":%d%%b}' % (name, model_version)
    activities.insert(2, description)
    return b",\n".join(activities)


def _record_json(record: TraceRecord) -> bytes:
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
