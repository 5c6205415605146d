"""Header forwarding: which headers become parameters, with which names and values."""

from __future__ import annotations

import pytest

from kernel.errors import BadOption
from protocols.forwarding import ForwardedHeaders, HeaderForwarder, ReservedHeader, last_value, make_forwarder


def test_nothing_is_forwarded_without_a_pattern() -> None:
    assert make_forwarder("") is None


def test_the_pattern_may_match_anywhere_in_the_name_in_any_case() -> None:
    forwarder = HeaderForwarder("x-[a-z]+")
    headers = [("X-User", "ann"), ("AX-abc", "2"), ("x-1", "no"), ("Accept", "*/*")]
    assert forwarder.parameters(headers) == {"X-User": "ann", "AX-abc": "2"}


def test_an_anchored_pattern_is_about_the_whole_name() -> None:
    assert HeaderForwarder("^x-user$").parameters([("X-User", "1"), ("X-User-Id", "2")]) == {"X-User": "1"}


def test_of_a_repeated_header_the_last_counts() -> None:
    assert HeaderForwarder("x").parameters([("x", "1"), ("x", "2"), ("X", "3")]) == {"x": "2", "X": "3"}


def test_values_are_always_text_that_a_model_can_be_sent() -> None:
    odd = b"caf\xe9 \xc3\xa9".decode(errors="surrogateescape")
    assert HeaderForwarder("x").parameters([("x", odd), ("xy", "")]) == {"x": "caf� é", "xy": ""}


@pytest.mark.parametrize(
    "name",
    [
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "Priority",
        "timeout",
        "headers",
        "binary_data_output",
        "triton_",
        "Triton_Enable_Empty_Final_Response",
    ],
)
def test_reserved_names_are_refused_as_they_were_sent(name: str) -> None:
    with pytest.raises(ReservedHeader) as caught:
        HeaderForwarder(".*").parameters([(name, "1")])
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_reserved_names_that_do_not_match_are_ignored() -> None:
    assert HeaderForwarder("^x").parameters([("priority", "u=1"), ("triton_a", "1")]) == {}


@pytest.mark.parametrize(
    ("pattern", "forwarded"),
    [
        ("(?-i)MY_HEADER.*", ["MY_HEADER_1"]),
        ("(?i)MY_HEADER.*", ["MY_HEADER_1", "my_header_2"]),
        ("(?s-i)my_.*", ["my_header_2"]),
        ("my_(?-i:h)eader", ["my_header_2"]),
    ],
)
def test_a_pattern_may_say_like_those_of_re2_whether_case_counts(pattern: str, forwarded: list[str]) -> None:
    headers = [("MY_HEADER_1", "a"), ("my_header_2", "b")]
    assert [*HeaderForwarder(pattern).parameters(headers)] == forwarded


@pytest.mark.parametrize("pattern", ["x-[[:alpha:]]+", "x-[[:^digit:]]", r"x-\pL", "x-(?i)Y", "(?U)x-y*"])
def test_a_pattern_may_have_what_re2_has_beyond_python(pattern: str) -> None:
    assert [*HeaderForwarder(pattern).parameters([("x-y", "a"), ("z", "b")])] == ["x-y"]


@pytest.mark.parametrize("pattern", [".*a.*b.*c", "(a+)+c", "x-.*-id"])
def test_no_name_makes_a_search_long(pattern: str) -> None:
    # With Python's `re` the first of them takes hours.
    assert HeaderForwarder(pattern).parameters([("ab" * 4000, "1"), ("a" * 8000, "2"), ("x-" * 4000, "3")]) == {}


@pytest.mark.parametrize(
    "pattern",
    [
        "(?<=a)b",
        "x(?<!a)b",
        "x(?=a)",
        "(?i)^(?!a).*",
        r"(a)\1",
        "(?P<n>a)(?P=n)",
        "(a)?(?(1)b|c)",
        "(?>a+)b",
        "a++b",
        "a(?#why)",
        r"a\Z",
        r"[\1]",
    ],
)
def test_what_only_pythons_patterns_have_is_refused_with_the_reason(pattern: str) -> None:
    with pytest.raises(BadOption, match=r"is not a regular expression for headers to forward: \w+ .*: ") as refused:
        HeaderForwarder(pattern)
    assert str(refused.value).startswith(f"'{pattern}' is not")


@pytest.mark.parametrize("pattern", [r"a\\1", r"[(?=]", "[]*+]x", r"\(\?=", "(?P<n>a+?)", "(?:x)+?", r"\++", r"x\d+"])
def test_what_only_looks_so_is_taken(pattern: str) -> None:
    HeaderForwarder(pattern)


def test_a_bad_pattern_is_refused_at_start() -> None:
    with pytest.raises(BadOption, match=r"^'\(' is not a regular expression for headers to forward: "):
        make_forwarder("(")


def test_headers_of_one_head_are_added_to_the_parameters_of_any_request() -> None:
    forwarded = HeaderForwarder("^x-").forward([("X-User", "ann"), ("Other", "1")])
    assert forwarded == ForwardedHeaders({"X-User": "ann"})
    assert forwarded is not None
    assert forwarded.added_to({"n": 5, "X-User": "bob"}) == {"n": 5, "X-User": "ann"}
    assert forwarded.added_to({}) == {"X-User": "ann"}
    assert HeaderForwarder("^x-").forward([("Other", "1")]) is None


def test_a_reserved_header_is_an_error_of_each_request_with_the_head() -> None:
    forwarded = HeaderForwarder(".").forward([("X-User", "ann"), ("Timeout", "1")])
    assert forwarded is not None
    for _ in range(2):
        with pytest.raises(ReservedHeader, match="^Header 'Timeout' is reserved"):
            forwarded.added_to({})


@pytest.mark.parametrize(
    ("headers", "value"),
    [
        ([], ""),
        ([(b"X-Key", b"a"), (b"x-key", b" b\t"), (b"x-keys", b"c")], "b"),
        ([("x-key", "caf\xc3\xa9")], "caf\u00e9"),
        ([("x-key", b"raw")], "raw"),
        ([(b"x-key", b"\xff")], "\udcff"),
    ],
)
def test_the_value_of_one_header_is_found_by_its_name(
    headers: list[tuple[str | bytes, str | bytes]], value: str
) -> None:
    assert last_value(headers, "x-key") == value
