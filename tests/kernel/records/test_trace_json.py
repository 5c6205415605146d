"""Traces as Triton's JSON."""

from __future__ import annotations

import json
import struct

import pytest

from kernel.records.trace import BACKEND_OUTPUT, QUEUE_INPUT, TracedTensor, TraceRecord, UsualRequest, UsualTrace
from kernel.records.trace_json import record_of, tensor_text, trace_json


def objects(record: TraceRecord | UsualTrace) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(b"[" + trace_json(record) + b"]")
    return found


def text(datatype: str, data: bytes, byte_size: int | None = None) -> tuple[str, str]:
    size = len(data) if byte_size is None else byte_size
    return tensor_text(TracedTensor(QUEUE_INPUT, "IN", datatype, [1], data, size))


def test_a_trace_is_a_description_and_one_object_for_each_time() -> None:
    times: list[str | int] = ["HTTP_RECV_START", 5, "REQUEST_END", 30, "HTTP_RECV_END", 20, "REQUEST_START", 20]
    assert objects(TraceRecord(7, 0, "m", 3, "r", times)) == [
        {"id": 7, "timestamps": [{"name": "HTTP_RECV_START", "ns": 5}]},
        {"id": 7, "timestamps": [{"name": "HTTP_RECV_END", "ns": 20}]},
        {"id": 7, "model_name": "m", "model_version": 3, "request_id": "r"},
        {"id": 7, "timestamps": [{"name": "REQUEST_START", "ns": 20}]},
        {"id": 7, "timestamps": [{"name": "REQUEST_END", "ns": 30}]},
    ]


@pytest.mark.parametrize("name", ["m", 'a "100 %b" name é'])
@pytest.mark.parametrize("request_id", ["", 'r "%d"'])
@pytest.mark.parametrize("door", [0, 1])
def test_a_usual_trace_is_written_as_its_record_is(name: str, request_id: str, door: int) -> None:
    usual = UsualTrace(10, UsualRequest(door, 7, (name, 3), request_id, 1, 2, 3, 4, (5, 6, 7, 8), 9))
    found = objects(usual)
    assert found == objects(record_of(usual))
    times = [each["timestamps"][0]["ns"] for each in found if "timestamps" in each]  # type: ignore[index]  # as in the test above
    assert times == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 10]


def test_times_of_a_usual_trace_that_are_not_in_order_are_sorted() -> None:
    usual = UsualTrace(10, UsualRequest(0, 7, ("m", 3), "", 1, 2, 3, 40, (5, 6, 7, 8), 9))  # the clock of another host
    assert objects(usual) == objects(record_of(usual))
    assert objects(usual)[5] == {"id": 7, "timestamps": [{"name": "COMPUTE_INPUT_END", "ns": 6}]}


def test_a_child_names_its_parent_and_a_failed_request_its_error() -> None:
    found = objects(TraceRecord(8, 7, "m", 3, "", ["REQUEST_START", 1], error='no "room"'))
    assert found[0] == {"id": 8, "model_name": "m", "model_version": 3, "parent_id": 7, "error": 'no "room"'}


def test_inputs_follow_the_start_of_the_queue_and_outputs_that_of_their_stage() -> None:
    tensors = [
        TracedTensor(BACKEND_OUTPUT, "OUT", "BYTES", [1], b"\2\0\0\0ab", 6),
        TracedTensor(QUEUE_INPUT, "IN", "INT32", [1, 2], struct.pack("<2i", 1, -2), 8),
    ]
    times: list[str | int] = ["REQUEST_START", 1, "QUEUE_START", 2, "COMPUTE_OUTPUT_START", 3, "COMPUTE_END", 4]
    found = objects(TraceRecord(1, 0, "m", 1, "", times, tensors))
    assert found[3] == {
        "id": 1, "activity": "TENSOR_QUEUE_INPUT",
        "tensor": {"name": "IN", "data": "1,-2", "shape": "1,2", "dtype": "INT32"},
    }  # fmt: skip
    assert found[5] == {
        "id": 1, "activity": "TENSOR_BACKEND_OUTPUT",
        "tensor": {"name": "OUT", "data": '"ab"', "shape": "1", "dtype": "BYTES"},
    }  # fmt: skip


def test_names_with_quotes_stay_json() -> None:
    tensors = [TracedTensor(QUEUE_INPUT, 'a"b', "BYTES", [1], b'\4\0\0\0a"b\xff', 8)]
    [found] = objects(TraceRecord(1, 0, 'm"', 1, "", [], tensors))
    assert found["tensor"] == {"name": 'a"b', "data": '"a\\"b\\\\xff"', "shape": "1", "dtype": "BYTES"}


@pytest.mark.parametrize(("datatype", "data", "expected"), [
    ("BOOL", b"\1\0", "1,0"), ("UINT8", b"\xff", "255"), ("INT8", b"\xff", "-1"),
    ("INT64", struct.pack("<q", -(2**40)), str(-(2**40))),
    ("FP32", struct.pack("<4f", 0.1, 3, 1e-20, 16777217), "0.1,3,1e-20,16777216"),
    ("FP64", struct.pack("<2d", 0.1, 3), "0.1,3"),
    ("FP16", struct.pack("<2e", 0.5, 65504), "0.5,65504"), ("BF16", struct.pack("<H", 0x3FC0), "1.5"),
    ("FP32", struct.pack("<3f", float("nan"), float("inf"), 3.4028234663852886e38), "nan,inf,3.40282347e+38"),
])  # fmt: skip
def test_each_datatype_has_its_text(datatype: str, data: bytes, expected: str) -> None:
    assert text(datatype, data) == (expected, "")


def test_a_cut_tensor_has_a_note() -> None:
    assert text("INT32", struct.pack("<2i", 1, 2), 4000) == ("1,2", "the first 2 elements of 4000 bytes")
    assert text("BYTES", b"\1\0\0\0a\x09\0\0\0bc", 18) == ('"a"', "the first 1 elements of 18 bytes")
    shown, note = text("UINT8", bytes(4096))
    assert (shown.count(","), note) == (1023, "the first 1024 elements of 4096 bytes")


def test_a_tensor_that_the_kernel_does_not_read_has_a_note_in_place_of_data() -> None:
    shown, note = text("FP32", b"", 40_000)
    assert shown == ""
    assert note.startswith("40000 bytes in shared memory")
    assert text("FP32", b"") == ("", "")
