"""A response in JSON from a template is what encoding makes of it, or does not come from the template."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from kernel.serving.response import Response
from protocols.http.inference.decoding import OutputFormat
from protocols.http.inference.encoding import encode_infer
from protocols.http.inference.response_templates import JsonResponseTemplate
from shm.datatypes import encode_strings
from shm.tensor import ClientSpan, Tensor

NOW_S = 5.0


def floats(*values: float, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", [len(values)], struct.pack(f"<{len(values)}f", *values))


def strings(*values: bytes) -> Tensor:
    return Tensor("S", "BYTES", [len(values)], encode_strings(values))


def response(*outputs: Tensor, id: str = "", **more: Any) -> Response:
    return Response(more.pop("model", "m"), more.pop("version", "3"), id, outputs=list(outputs), **more)


def encoded(given: Response) -> bytes:
    body = encode_infer(given, OutputFormat()).header
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nDate: today\r\n\r\n" % len(body) + body


def remembering(given: Response) -> JsonResponseTemplate:
    template = JsonResponseTemplate()
    assert template.fill_in(given, NOW_S) is None
    body = encode_infer(given, OutputFormat())
    head = encoded(given).removesuffix(body.header)
    template.remember(given, [body.header, *body.binary], head, NOW_S)
    return template


@pytest.mark.parametrize(
    ("first", "following"),
    [
        ([floats(1, 2)], [floats(0.1, -1e-30)]),
        ([floats(1), floats(2, name="Y")], [floats(1e38), floats(-0.0, name="Y")]),
        ([Tensor("B", "BOOL", [2], b"\0\1")], [Tensor("B", "BOOL", [2], b"\1\1")]),
        ([Tensor("I", "INT64", [1], bytes(8))], [Tensor("I", "INT64", [1], b"\xff" * 8)]),
        ([Tensor("U", "UINT64", [1], bytes(8))], [Tensor("U", "UINT64", [1], memoryview(b"\xff" * 8))]),
        ([Tensor("D", "FP64", [1], bytes(8))], [Tensor("D", "FP64", [1], struct.pack("<d", 1e16))]),
        ([strings(b"a", b"b")], [strings(b'"\\\n', "ä\u2028".encode())]),
        ([strings(b"a")], [strings(b"\xff")]),
        ([Tensor("R", "FP32", [2], client_span=ClientSpan("r", 8)), floats(1)],) * 2,
        ([floats()], [floats()]),
    ],
)
@pytest.mark.parametrize(("id", "next_id"), [("", ""), ("1", "a longer one"), ('"', "\0"), ("ä", "x")])
def test_what_is_filled_in_is_what_encoding_makes_of_it(
    first: list[Tensor], following: list[Tensor], id: str, next_id: str
) -> None:
    template = remembering(response(*first, id=id, parameters={"x": 1}))
    for outputs, each_id in ((following, next_id), (first, id)):
        given = response(*outputs, id=each_id, parameters={"x": 1})
        assert template.fill_in(given, NOW_S) == encoded(given)


@pytest.mark.parametrize(
    "other",
    [
        response(floats(1, math.nan)),
        response(floats(1, math.inf)),
        response(floats(1)),
        response(floats(1, 2, 3)),
        response(floats(1, 2, name="Y")),
        response(floats(1, 2), floats(1, 2)),
        response(Tensor("X", "FP32", [1, 2], bytes(8))),
        response(Tensor("X", "INT32", [2], bytes(8))),
        response(Tensor("X", "FP32", [2], bytes(7))),
        response(Tensor("X", "FP32", [2], client_span=ClientSpan("r", 8))),
        response(floats(1, 2), id="1"),
        response(floats(1, 2), model="n"),
        response(floats(1, 2), version="4"),
        response(floats(1, 2), parameters={"x": True}),
    ],
)
def test_what_differs_in_more_is_encoded(other: Response) -> None:
    assert remembering(response(floats(1, 2))).fill_in(other, NOW_S) is None


def test_a_sum_that_is_infinite_is_left_to_the_encoder() -> None:
    largest = struct.pack("<2d", 1.7e308, 1.7e308)
    template = remembering(response(Tensor("X", "FP64", [2], bytes(16))))
    assert template.fill_in(response(Tensor("X", "FP64", [2], largest)), NOW_S) is None


@pytest.mark.parametrize("count", [63, 64, 1024])
def test_many_floats_are_written_digit_for_digit(count: int) -> None:
    values = [1e16, -0.0, 5e-324, 1 / 3, 1.7976931348623157e308, *range(count - 5)]
    given = response(Tensor("X", "FP64", [count], struct.pack(f"<{count}d", *values)))
    template = remembering(response(Tensor("X", "FP64", [count], bytes(8 * count))))
    assert template.fill_in(given, NOW_S) == encoded(given)
    for special in (math.nan, math.inf, -math.inf):
        other = response(Tensor("X", "FP64", [count], struct.pack(f"<{count}d", special, *values[1:])))
        assert template.fill_in(other, NOW_S) is None
    assert template.fill_in(response(Tensor("X", "FP64", [count], bytes(8))), NOW_S) is None


def test_a_template_holds_for_one_second() -> None:
    given = response(floats(1, 2))
    assert remembering(given).fill_in(given, NOW_S + 1) is None


def test_strings_that_do_not_fit_or_are_long_are_left_to_the_encoder() -> None:
    template = remembering(response(strings(b"a")))
    assert template.fill_in(response(Tensor("S", "BYTES", [1], b"\x05\0\0\0ab")), NOW_S) is None
    assert template.fill_in(response(strings(b"x" * 20_000)), NOW_S) is None


@pytest.mark.parametrize("outputs", [[floats(*range(5000))], [floats(1, name="x" * 3000)]])
def test_large_responses_are_not_remembered(outputs: list[Tensor]) -> None:
    given = response(*outputs)
    assert remembering(given).fill_in(given, NOW_S) is None
