"""Recorded responses beside those of now.

The report of a replay.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from kernel.records.recording_format import RecordedTensor, ResponseRecord
from kernel.records.replay_target import ReplayedOutput, ReplayedResponse
from kernel.tools import replay_report as module
from kernel.tools.replay_report import Comparison, ReplayReport, Tolerance, compare

EXACT = Tolerance()


def fp32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def recorded(datatype: str, count: int, data: bytes) -> list[ResponseRecord]:
    return [ResponseRecord(1, 2, True, outputs=[RecordedTensor("o", datatype, [count], len(data), data=data)])]


def now(datatype: str, count: int, data: bytes) -> list[ReplayedResponse]:
    return [ReplayedResponse([ReplayedOutput("o", datatype, [count], data)])]


def differences(datatype: str, count: int, old: bytes, new: bytes, tolerance: Tolerance = EXACT) -> list[str]:
    found = compare(recorded(datatype, count, old), now(datatype, count, new), tolerance)
    assert found.compared == 1
    return found.differences


def test_equal_bytes_do_not_differ() -> None:
    assert differences("FP32", 2, fp32(1, np.nan), fp32(1, np.nan)) == []


def test_the_worst_element_is_named() -> None:
    assert differences("FP32", 3, fp32(1, 2, 3), fp32(1, 2.5, 3.25)) == [
        "output 'o' differs in 2 of 3 elements, by at most 0.5; element 1 is 2.5, and recorded was 2.0"
    ]


@pytest.mark.parametrize(
    ("tolerance", "differs"),
    [
        (Tolerance(absolute=0.5), False), (Tolerance(absolute=0.4), True),
        (Tolerance(relative=0.25), False), (Tolerance(relative=0.2), True),
    ],
)  # fmt: skip
def test_numbers_within_the_tolerance_do_not_differ(tolerance: Tolerance, differs: bool) -> None:
    assert bool(differences("FP32", 2, fp32(1, 2), fp32(1, 2.5), tolerance)) == differs
    assert bool(differences("FP64", 1, struct.pack("<d", 2), struct.pack("<d", 2.5), tolerance)) == differs


def test_whole_numbers_have_a_tolerance_too() -> None:
    old, new = np.array([10, -3], np.int8).tobytes(), np.array([11, -3], np.int8).tobytes()
    assert differences("INT8", 2, old, new, Tolerance(absolute=1)) == []
    assert "differs in 1 of 2 elements, by at most 1" in differences("INT8", 2, old, new)[0]


def test_half_floats_of_both_kinds_are_compared_as_numbers() -> None:
    old, new = (np.array([value], np.float16).tobytes() for value in (1.0, 1.5))
    assert "by at most 0.5" in differences("FP16", 1, old, new)[0]
    old, new = (np.array([value], np.float32).tobytes()[2:] for value in (1.0, 1.5))
    assert "by at most 0.5" in differences("BF16", 1, old, new)[0]
    assert differences("BF16", 1, old, new, Tolerance(absolute=0.5)) == []


def test_a_number_in_place_of_none_is_beyond_any_tolerance() -> None:
    assert "element 0 is nan, and recorded was 1.0" in differences("FP32", 1, fp32(1), fp32(np.nan), Tolerance(9, 9))[0]
    assert differences("FP32", 1, fp32(np.inf), fp32(1), Tolerance(absolute=9)) != []


def test_other_bytes_of_equal_numbers_differ_only_without_a_tolerance() -> None:
    assert differences("FP32", 1, fp32(0.0), fp32(-0.0)) == [
        "output 'o' has equal values in other bytes (signs of zeros, or NaNs)"
    ]
    assert differences("FP32", 1, fp32(0.0), fp32(-0.0), Tolerance(absolute=1e-9)) == []


def test_texts_are_compared_element_by_element() -> None:
    assert differences("BYTES", 2, texts(b"a", b"b"), texts(b"a", b"cc")) == [
        "output 'o' differs in 1 of 2 elements; element 1 is b'cc', and recorded was b'b'"
    ]


def test_bytes_that_are_no_tensor_differ_without_a_number() -> None:
    assert differences("BYTES", 1, texts(b"a"), b"x") == ["output 'o' has other bytes"]
    assert differences("FP32", 2, fp32(1, 2), fp32(1)) == ["output 'o' has 4 bytes, and recorded were 8"]


def test_names_types_and_shapes_are_compared() -> None:
    old = recorded("FP32", 1, fp32(1))
    assert compare(old, now("FP64", 1, bytes(8)), EXACT).differences == [
        "output 'o' is FP64 [1], and recorded was FP32 [1]"
    ]
    other = [ReplayedResponse([ReplayedOutput("p", "FP32", [1], fp32(1))])]
    assert compare(old, other, EXACT).differences == ["output 'o' is missing", "output 'p' was not recorded"]


def test_a_digest_is_compared_with_the_bytes() -> None:
    tensor = RecordedTensor("o", "FP32", [1], 4, sha256=hashlib.sha256(fp32(1)).digest())
    old = [ResponseRecord(1, 2, True, outputs=[tensor])]
    assert compare(old, now("FP32", 1, fp32(1)), EXACT).differences == []
    assert compare(old, now("FP32", 1, fp32(2)), EXACT).differences == [
        "output 'o' differs; only its digest was recorded"
    ]


def test_outputs_in_regions_are_counted_as_not_compared() -> None:
    old = [ResponseRecord(1, 2, True, outputs=[RecordedTensor("o", "FP32", [1], 4, region="r")])]
    found = compare(old, now("FP32", 1, fp32(1)), EXACT)
    assert (found.differences, found.compared, found.not_compared) == ([], 0, 1)


def test_errors_are_compared_by_their_texts() -> None:
    def found(old: str, new: str) -> tuple[list[str], bool]:
        comparison = compare([ResponseRecord(1, 2, True, error=old)], [ReplayedResponse(error=new)], EXACT)
        return comparison.differences, comparison.errors_differ

    assert found("wrong", "wrong") == ([], False)
    assert found("wrong", "bad") == (["another error: bad; recorded was: wrong"], True)
    good = recorded("FP32", 1, fp32(1))
    comparison = compare(good, [ReplayedResponse(error="bad")], EXACT)
    assert (comparison.differences, comparison.errors_differ) == (["an error that was not recorded: bad"], True)
    comparison = compare([ResponseRecord(1, 2, True, error="wrong")], now("FP32", 1, fp32(1)), EXACT)
    assert (comparison.differences, comparison.errors_differ) == (["no error, and recorded was: wrong"], True)


def test_streams_are_compared_response_by_response_and_the_mark_of_the_end_does_not_count() -> None:
    old = [*recorded("FP32", 1, fp32(1)), *recorded("FP32", 1, fp32(2)), ResponseRecord(1, 3, True)]
    assert compare(old, [*now("FP32", 1, fp32(1)), *now("FP32", 1, fp32(2))], EXACT).differences == []
    assert compare(old, [*now("FP32", 1, fp32(1)), *now("FP32", 1, fp32(3))], EXACT).differences == [
        "response 2: output 'o' differs in 1 of 1 elements, by at most 1; element 0 is 3.0, and recorded was 2.0"
    ]
    short = compare(old, now("FP32", 1, fp32(1)), EXACT)
    assert (short.differences, short.errors_differ) == (["2 responses were recorded, now there are 1"], False)
    failed = compare(old[:1], [*now("FP32", 1, fp32(1)), ReplayedResponse(error="late")], EXACT)
    assert failed.errors_differ


BEYOND = "output '{}' differs in {} of 2 elements, by at most {}; element {} is {}, and recorded was {}"


def report_of(*texts: str) -> ReplayReport:
    report = ReplayReport("t")
    for number, text in enumerate(texts):
        report.add("m", f"r{number}", Comparison([text], compared=1), 1, 1)
    return report


@pytest.mark.parametrize(("one", "other", "same"), [
    (BEYOND.format("OUT", 1, 0.25, 0, 2.25, 2.0), BEYOND.format("OUT", 2, "1e-07", 1, -1.5, "nan"), True),
    (BEYOND.format("OUTPUT0", 1, 0.25, 0, 2.25, 2.0), BEYOND.format("OUTPUT1", 1, 0.25, 0, 2.25, 2.0), False),
    ("element 1 is b'cc', and recorded was b'b'", "element 7 is b'it\\'s', and recorded was b\"a'b\"", True),
    ("[request id: a] wrong", "[request id: <id_unknown>] wrong", True),
    ("another error: a; recorded was: b", "another error: c; recorded was: b", False),
])  # fmt: skip
def test_texts_that_differ_in_values_are_of_one_kind(one: str, other: str, same: bool) -> None:
    kinds = report_of(one, other).kinds
    assert len(kinds) == (1 if same else 2)
    assert kinds[0].text == one


def test_the_most_frequent_kind_comes_first_and_the_rest_is_counted() -> None:
    text = report_of("seldom", "often", "often", "other").as_text(1)
    assert "m: 2 times, first: request r1: often\n… and 2 more of 2 other kinds (--show N, or --json)\n" in text
    assert "seldom" not in text


def test_what_is_kept_has_a_limit_and_everything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 3)
    monkeypatch.setattr(module, "MOST_KINDS", 2)
    found = report_of("a", "b", "c", "d").as_json()
    assert (len(found["differences"]), found["difference_count"]) == (3, 4)
    assert sum(each["count"] for each in found["kinds_of_differences"]) == 4
    assert len(found["kinds_of_differences"]) == 3


def test_the_largest_distance_is_that_of_all_requests() -> None:
    report = ReplayReport("t")
    for distance in (0.5, 2.0, 1.0):
        report.add("m", "", Comparison(["d"], compared=1, largest_distance=distance), None, 1)
    (model,) = report.as_json()["models"]
    assert model["largest_distance"] == 2.0
    assert "| 2 " in report.as_text(1)


def test_texts_of_servers_cannot_change_the_terminal() -> None:
    assert "\x1b" not in report_of("an error: \x1b[2J").as_text(1)


@pytest.mark.parametrize(("comparison", "code", "verdict"), [
    (Comparison(compared=1), 0, "No response differs."),
    (Comparison(["d"], compared=1), 1, "Responses differ."),
    (Comparison(not_compared=1), 2, "Nothing was compared."),
])  # fmt: skip
def test_the_exit_code_says_what_was_found_out(comparison: Comparison, code: int, verdict: str) -> None:
    report = ReplayReport("t")
    report.add("m", "", comparison, 1, 1)
    assert (report.exit_code, report.verdict) == (code, verdict)
