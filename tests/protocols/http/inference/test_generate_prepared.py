"""Bodies of /generate are recognised by the text around the inputs and the id, and read as parsing reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import ServingError
from kernel.serving.request import REQUEST_BYTE_SIZE, Request
from kernel.serving.validation import validate
from kernel.testing import RecordingSink
from protocols.http.inference.generate_codec import decode_generate
from protocols.http.inference.generate_prepared import PreparedGenerateBodies

if TYPE_CHECKING:
    from kernel.serving.route import ModelRoute

ROUTE: ModelRoute = object()  # type: ignore[assignment]  # prepared bodies only hand it back
SINK = RecordingSink()
LIMIT = 1 << 10
EXAMPLES = int(os.environ.get("NAIAD_EXAMPLES", "2000"))


def tensor(name: str, datatype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, datatype, shape, shape, optional=True)


SPEC = ModelSpec(
    "m",
    "",
    "fake",
    0,
    {
        each.name: each
        for each in (tensor("TEXT", "BYTES", (-1,)), tensor("NUMBERS", "INT32", (-1, 2)), tensor("ONE", "FP32", (1,)))
    },
    {},
)


def new_request() -> Request:
    return Request("m", [], SINK, streaming=True)


def parsed(text: bytes) -> Request:
    request = new_request()
    decode_generate(text, request, SPEC, LIMIT)
    validate(request, SPEC)
    return request


def facts(request: Request) -> object:
    inputs = sorted((t.name, t.datatype, list(t.shape), t.data) for t in request.inputs)
    return inputs, request.id, list(request.parameters.items()), request.batch_size


def remembering(*texts: bytes) -> PreparedGenerateBodies:
    bodies = PreparedGenerateBodies(LIMIT)
    bodies.fill(new_request(), b"", 1)
    for text in texts:
        bodies.add(text, parsed(text), ROUTE)
    return bodies


def read(bodies: PreparedGenerateBodies, text: bytes) -> Request | None:
    request = new_request()
    prepared = bodies.fill(request, text, 1)
    if prepared is None:
        assert facts(request) == facts(new_request()), "a request that is not recognised is as it was"
    return None if prepared is None else request


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (b'{"TEXT": "hi", "max_tokens": 5}', b'{"TEXT": "\\u00e4 \\"max_tokens\\": 6}", "max_tokens": 5}'),
        (b'{"id":"1","TEXT":"hi"}', b'{"id":"222","TEXT":""}'),
        (b'{"TEXT":"hi","stream":false,"id":"1"}', b'{"TEXT":"ho","stream":false,"id":"\\n"}'),
        (b'{"ONE": 1, "TEXT": "a"}', b'{"ONE": -2.5, "TEXT": "b"}'),
        (b'{"NUMBERS": [1, 2]}', b'{"NUMBERS": [ 3,-4 ]}'),
        (b'{"TEXT": ["a", "b"]}', b'{"TEXT": ["c", ""]}'),
        (b'{"parameters": {"t": 0.5}, "TEXT": "a"}', b'{"parameters": {"t": 0.5}, "TEXT": "b"}'),
        (b'{"TEXT": "TEXT", "x": "TEXT"}', b'{"TEXT": "y", "x": "TEXT"}'),
    ],
)
def test_bodies_that_differ_in_inputs_and_id_are_recognised(first: bytes, other: bytes) -> None:
    for text in (first, other):
        found = read(remembering(first), text)
        assert found is not None
        assert facts(found) == facts(parsed(text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"TEXT": "a", "max_tokens": 6}', b'{"TEXT": 5, "max_tokens": 5}', b'{"TEXT": ["a"], "max_tokens": 5}',
        b'{"TEXT": "a", "max_tokens": 5, "max_tokens": 5}', b'{"TEXT": "a", "TEXT": "b", "max_tokens": 5}',
        b'{"TEXT": "\xff", "max_tokens": 5}', b'{"TEXT": "a, "max_tokens": 5}',
        b'{"TEXT": "%b", "max_tokens": 5}' % (b"x" * LIMIT),
    ],
)  # fmt: skip
def test_other_bodies_are_left_to_the_parser(text: bytes) -> None:
    assert read(remembering(b'{"TEXT": "hi", "max_tokens": 5}'), text) is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"TEXT": []}',
        b'{"parameters": {"TEXT": "a"}}',
        b'{"id": "1", "TEXT": "a", "parameters": {"id": "2"}}',
        b'{"TEXT": "a", "x": "%b"}' % (b"x" * 3000),
        b'{"x": 1}',
    ],
)
def test_bodies_of_another_kind_are_parsed_each_time(text: bytes) -> None:
    assert read(remembering(text), text) is None


def test_the_number_of_strings_belongs_to_what_is_recognised() -> None:
    bodies = remembering(b'{"TEXT": ["a", "b"]}')
    assert read(bodies, b'{"TEXT": ["a"]}') is None
    assert read(bodies, b'{"TEXT": ["a", "b", "c"]}') is None


def test_a_prompt_counts_with_its_length() -> None:
    found = read(remembering(b'{"TEXT": "a"}'), b'{"TEXT": "%b"}' % (b"x" * 100))
    assert found is not None
    assert found.byte_size == REQUEST_BYTE_SIZE + 104


def test_what_is_prepared_holds_until_the_catalog_changes() -> None:
    text = b'{"TEXT": "a"}'
    bodies = remembering(text)
    request = new_request()
    assert bodies.fill(request, text, 2) is None
    assert bodies.fill(request, text, 2) is None


def test_models_and_versions_are_told_apart() -> None:
    bodies = remembering(b'{"TEXT": "a"}')
    for name, version in (("n", ""), ("m", "1")):
        request = Request(name, [], SINK, model_version=version, streaming=True)
        assert bodies.fill(request, b'{"TEXT": "a"}', 1) is None


def test_clients_that_never_repeat_themselves_do_not_fill_the_memory() -> None:
    bodies = remembering(*(b'{"TEXT": "a", "seed": %d}' % number for number in range(200)))
    assert len(bodies.cache.entries["m", ""].prepared) == 8


VALUES = [
    '"a"', '""', '"\\u00e4"', '"\\ud800"', '"\\"TEXT\\": 1"', '"}"', '"\\u0000hole 0"', "1", "1.5", "-0", "2147483648",
    "1e39", "1e400", "NaN", "true", "null", "[]", "[1]", "[1, 2]", "[1, 2, 3, 4]", '["a"]', '["a", "b"]', "[[1, 2]]",
    '[["a"]]', "{}", '{"id": "x"}', '{"TEXT": "x"}', '{"t": 1}', "[1, NaN]", '"a',
]  # fmt: skip
KEYS = ['"TEXT"', '"NUMBERS"', '"ONE"', '"id"', '"x"', '"parameters"', '"T\\u0045XT"', '"i\\u0064"']
USUAL = {'"TEXT"': ['"a"', '"b c"'], '"NUMBERS"': ["[1, 2]", "[3, 4]"], '"ONE"': ["1", "2.5"], '"id"': ['"1"', '"22"']}


@st.composite
def conversations(draw: Any) -> list[bytes]:
    """Return bodies with the same members, of which some values differ."""
    keys = draw(st.lists(st.sampled_from(KEYS[:5] * 4 + KEYS), min_size=1, max_size=5))
    constant = {key: draw(st.sampled_from(VALUES)) for key in ('"x"', '"parameters"')}
    comma, colon = draw(st.sampled_from([",", ", ", "\n,"])), draw(st.sampled_from([":", ": "]))

    def value(key: str) -> str:
        choices = USUAL.get(key, [constant[key]] if key in constant else VALUES)
        text: str = draw(st.sampled_from(choices if key in constant or draw(st.integers(0, 7)) else VALUES))
        return text

    texts = []
    for _ in range(draw(st.integers(2, 4))):
        octets = ("{" + comma.join(key + colon + value(key) for key in keys) + "}").encode()
        if draw(st.integers(0, 15)) == 0:
            place = draw(st.integers(0, len(octets)))
            octets = octets[:place] + draw(st.sampled_from([b"\0", b'"', b"}", b"\xff", b","])) + octets[place:]
        texts.append(octets)
    return texts


@settings(max_examples=EXAMPLES)
@given(conversations())
def test_what_is_recognised_is_what_the_parser_takes(texts: list[bytes]) -> None:
    bodies = remembering()
    for text in (*texts, *texts):
        found = read(bodies, text)
        try:
            expected = parsed(text)
        except ServingError:
            assert found is None
            continue
        if found is None:
            bodies.add(text, expected, ROUTE)
        else:
            assert facts(found) == facts(expected)
            event("recognised")
