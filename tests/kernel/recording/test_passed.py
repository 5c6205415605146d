"""What the helper makes of the messages of the kernel."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from kernel.recording.format import RecordedOutput, RecordedTensor, RequestRecord, ResponseRecord
from kernel.recording.passed import (
    TOO_LARGE,
    PassedOutput,
    PassedRequest,
    PassedResponse,
    PassedTensor,
    TensorRules,
    record_of,
)
from shm.tensor import ClientSpan, RequestedOutput, Tensor

BY_VALUE = TensorRules(limit=4, input_digests=False, output_digests=False)
BY_DIGEST = TensorRules(limit=4, input_digests=True, output_digests=True)

TENSORS = [
    PassedTensor("inline", "UINT8", [3], b"abc"),
    PassedTensor("source", "UINT8", [4], source=1),
    PassedTensor("large", "UINT8", [5], source=0),
    PassedTensor("region", "UINT8", [6], region=ClientSpan("r", 6, 8), byte_size=6),
    PassedTensor("missing", "UINT8", [9], byte_size=9, missing="no memory"),
    PassedTensor("empty", "UINT8", [0], b""),
]
#: Those of another message stand before.
SOURCES = [memoryview(b"other"), memoryview(b"12345"), memoryview(b"wxyz")]

REGION = RecordedTensor("region", "UINT8", [6], 6, region="r", offset=8)
MISSING = RecordedTensor("missing", "UINT8", [9], 9, missing="no memory")
EMPTY = RecordedTensor("empty", "UINT8", [0], 0)
INLINE = RecordedTensor("inline", "UINT8", [3], 3, data=b"abc")
SOURCE = RecordedTensor("source", "UINT8", [4], 4, data=b"wxyz")
LARGE = RecordedTensor("large", "UINT8", [5], 5, sha256=hashlib.sha256(b"12345").digest())
DIGESTS = [
    RecordedTensor("inline", "UINT8", [3], 3, sha256=hashlib.sha256(b"abc").digest()),
    RecordedTensor("source", "UINT8", [4], 4, sha256=hashlib.sha256(b"wxyz").digest()),
    LARGE, REGION, MISSING, EMPTY,
]  # fmt: skip


def request(inputs: list[PassedTensor]) -> PassedRequest:
    return PassedRequest(
        7, 8, "m", 2, inputs, "2", "id", [PassedOutput("o", 3, None, ClientSpan("r", 2, 1))], {"p": 1}, 5, True, True,
        True, 9, 10, True, "grpc", 1,
    )  # fmt: skip


@pytest.mark.parametrize(("rules", "expected"), [
    (BY_VALUE, [INLINE, SOURCE, RecordedTensor("large", "UINT8", [5], 5, missing=TOO_LARGE), REGION, MISSING, EMPTY]),
    (BY_DIGEST, DIGESTS),
])  # fmt: skip
def test_inputs_are_recorded_by_value_or_digest_and_large_values_are_left_out(
    rules: TensorRules, expected: list[RecordedTensor]
) -> None:
    assert record_of(request(TENSORS), SOURCES, rules) == RequestRecord(
        7, 8, "m", 2, expected, "2", "id", [RecordedOutput("o", 3, "r", 1, 2)], {"p": 1}, 5, True, True, True, 9, 10,
        True, "grpc",
    )  # fmt: skip


@pytest.mark.parametrize(("rules", "expected"), [
    (BY_VALUE, [INLINE, SOURCE, LARGE, REGION, MISSING, EMPTY]),
    (BY_DIGEST, DIGESTS),
])  # fmt: skip
def test_outputs_that_are_large_are_recorded_by_their_digest(
    rules: TensorRules, expected: list[RecordedTensor]
) -> None:
    passed = PassedResponse(7, 9, True, "2", TENSORS, {"p": 2}, "", "", 8, 1)
    assert record_of(passed, SOURCES, rules) == ResponseRecord(7, 9, True, "2", expected, {"p": 2}, queued_ns=8)


def test_an_error_and_the_mark_of_an_end_have_no_outputs() -> None:
    failed = PassedResponse(7, 9, True, "2", None, None, "wrong", "internal", 0)
    assert record_of(failed, [], BY_VALUE) == ResponseRecord(7, 9, True, "2", None, {}, "wrong", "internal")
    last = PassedResponse(7, 9, True, "2", None, None, "", "", 0)
    assert record_of(last, [], BY_VALUE) == ResponseRecord(7, 9, True, "2")


@pytest.mark.parametrize(("given", "kind", "expected"), [
    (Tensor("a", "UINT8", [2], b"ab"), PassedTensor, PassedTensor("a", "UINT8", [2], b"ab")),
    (Tensor("a", "UINT8", [2], memoryview(b"ab")), PassedTensor, PassedTensor("a", "UINT8", [2], b"ab")),
    (Tensor("a", "UINT8", [2], None, None, ClientSpan("r", 2, 1)), PassedTensor,
     PassedTensor("a", "UINT8", [2], region=ClientSpan("r", 2, 1))),
    (RequestedOutput("o"), PassedOutput, PassedOutput("o")),
    (RequestedOutput("o", 3, None, ClientSpan("r", 2, 1), ["label"], True), PassedOutput,
     PassedOutput("o", 3, None, ClientSpan("r", 2, 1))),
])  # fmt: skip
def test_tensors_and_outputs_of_requests_are_passed_as_they_are(
    given: object, kind: type[object], expected: object
) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=kind) == expected
