"""A response from a template is what encoding makes of it, or does not come from the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.response import Response
from protocols.http.inference.decoding import OutputFormat
from protocols.http.inference.encoding import encode_infer
from protocols.http.inference.response_templates import ResponseTemplate
from shm.tensor import ClientSpan, Tensor

if TYPE_CHECKING:
    from shm.tensor import Buffer

NOW_S = 5.0


def output(data: Buffer | None = bytes(8), *, name: str = "X", datatype: str = "FP32", shape: Any = (2,)) -> Tensor:
    region = ClientSpan("r", 8) if data is None else None
    return Tensor(name, datatype, list(shape), data, client_span=region)


def response(*outputs: Tensor, id: str = "", **more: Any) -> Response:
    return Response(more.pop("model", "m"), more.pop("version", "3"), id, outputs=list(outputs), **more)


def head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)


def encoded(given: Response, outputs: OutputFormat | None = None) -> bytes:
    body = encode_infer(given, outputs or OutputFormat(binary=True)).join()
    return head(body) + body


def remembering(given: Response, outputs: OutputFormat | None = None) -> ResponseTemplate:
    template = ResponseTemplate()
    assert template.fill_in(given, NOW_S) is None
    body = encode_infer(given, outputs or OutputFormat(binary=True))
    template.remember(given, [body.header, *body.binary], head(body.join()), NOW_S)
    return template


@pytest.mark.parametrize(
    "outputs",
    [
        [output(), output(name="Y")],
        [output(None), output(name="Y")],
        [output(None)],
        [output(b"", shape=(0,)), output(memoryview(bytes(range(8))), name="Y")],
        [],
    ],
)
@pytest.mark.parametrize(
    ("id", "next_id"), [("", ""), ("1", "2"), ("a", '"'), ('q"', "\\n"), ('q"', "xyz"), ("ä", "xy"), ("\n", "\u2028")]
)
def test_what_is_filled_in_is_what_encoding_makes_of_it(outputs: list[Tensor], id: str, next_id: str) -> None:
    template = remembering(response(*outputs, id=id))
    again = [
        Tensor(o.name, o.datatype, list(o.shape), o.data and bytes(len(o.data)), client_span=o.client_span)
        for o in outputs
    ]
    following = response(*again, id=next_id)
    written = template.fill_in(following, NOW_S)
    assert written is None or written == encoded(following)
    assert template.fill_in(response(*outputs, id=id), NOW_S) == encoded(response(*outputs, id=id))


def test_ids_of_one_length_are_written_alike() -> None:
    template = remembering(response(output(), id="1"))
    for id in "2", "z", "7":
        assert template.fill_in(response(output(bytes(range(8))), id=id), NOW_S) == encoded(
            response(output(bytes(range(8))), id=id)
        )


@pytest.mark.parametrize(
    "other",
    [
        response(output(), id="12"),
        response(output()),
        response(output(), id="1", model="n"),
        response(output(), id="1", version="4"),
        response(output(), id="1", parameters={"p": 1}),
        response(output(), output(), id="1"),
        response(id="1"),
        response(output(bytes(4)), id="1"),
        response(output(None), id="1"),
        response(output(shape=(1, 2)), id="1"),
        response(output(name="Y"), id="1"),
        response(output(datatype="INT32"), id="1"),
        Response("m", "3", "1"),
    ],
)
def test_other_responses_are_encoded(other: Response) -> None:
    template = remembering(response(output(), id="1"))
    assert template.fill_in(other, NOW_S) is None
    assert template.fill_in(response(output(), id="1"), NOW_S) is not None


SEQUENCE = {"sequence_id": 1, "sequence_start": False, "sequence_end": False}


def test_equal_parameters_are_written_alike_as_ensembles_repeat_them() -> None:
    template = remembering(response(output(), id="1", parameters=SEQUENCE))
    following = response(output(bytes(range(8))), id="2", parameters=dict(SEQUENCE))
    assert template.fill_in(following, NOW_S) == encoded(following)


@pytest.mark.parametrize(
    "parameters", [None, {}, SEQUENCE | {"sequence_id": 2}, SEQUENCE | {"sequence_id": True}, {"sequence_id": 1}]
)
def test_other_parameters_are_encoded(parameters: dict[str, int] | None) -> None:
    template = remembering(response(output(), parameters=SEQUENCE))
    assert template.fill_in(response(output(), parameters=parameters), NOW_S) is None


def test_an_output_with_data_is_not_one_in_a_region() -> None:
    assert remembering(response(output(None))).fill_in(response(output()), NOW_S) is None


@pytest.mark.parametrize(
    ("given", "binary"),
    [
        (response(output()), False),
        (response(output(b"\x01\0\0\0x", datatype="BYTES", shape=(1,))), True),
        (response(output(shape=(1,) * 2000)), True),
    ],
)
def test_responses_that_differ_in_more_than_bytes_are_encoded_each(given: Response, binary: bool) -> None:
    assert remembering(given, OutputFormat(binary=binary)).fill_in(given, NOW_S) is None


def test_a_head_is_written_anew_as_time_passes() -> None:
    template = remembering(response(output()))
    assert template.fill_in(response(output()), NOW_S + 1) is None


def test_the_shape_of_a_template_is_its_own() -> None:
    given = response(output())
    template = remembering(given)
    assert given.outputs is not None
    given.outputs[0].shape.append(1)
    assert template.fill_in(given, NOW_S) is None
