"""The W3C trace context of clients."""

from __future__ import annotations

import json

import pytest

from kernel.records.trace_context import CallerContext, context_as_json, parse_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_the_last_bit_of_the_flags_says_whether_the_client_records_its_part(flags: str, sampled: bool) -> None:
    assert parse_trace_context(f"00-{TRACE}-{SPAN}-{flags}", "a=b") == CallerContext(TRACE, SPAN, sampled, "a=b")


@pytest.mark.parametrize("wrong", [
    "", "00", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01\n0",
])  # fmt: skip
def test_a_wrong_header_is_no_context(wrong: str) -> None:
    assert parse_trace_context(wrong) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_trace_context(f"01-{TRACE}-{SPAN}-01-more") == CallerContext(TRACE, SPAN, True)


@pytest.mark.parametrize("state", ["a" * 2000, "a=\xe4"])
def test_a_state_that_cannot_be_passed_on_is_dropped(state: str) -> None:
    found = parse_trace_context(f"00-{TRACE}-{SPAN}-01", state)
    assert found is not None
    assert found.state == ""


def test_models_get_the_context_as_json() -> None:
    found = context_as_json("00-1-2-01", "a=b")
    assert found is not None
    assert json.loads(found) == {"traceparent": "00-1-2-01", "tracestate": "a=b"}
    assert context_as_json("00-1-2-01") == '{"traceparent": "00-1-2-01"}'
    assert context_as_json("") is None
