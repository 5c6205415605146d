"""Whatever JSON comes, a server that has seen requests like it responds as one that sees its first request.

`NAIAD_EXAMPLES` is how many examples hypothesis makes; `make test-nightly` asks for many.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from protocols.http.inference.infer_call import HttpInference
from tests.protocols.http.inference.json_lab import MAX_INPUT_SIZE, NUMBERS, STRINGS, USUAL, Lab

EXAMPLES = int(os.environ.get("NAIAD_EXAMPLES", "2000"))


ODD = ["true", "false", "null", "{}", "[]", '{"data": [1]}', "tru", ""]

SPACES = ["", "", "", " ", "\n\t", "  "]


@st.composite
def elements(draw: Any, datatype: str, count: int) -> str:
    """Return an array, usually of the right elements in the right number."""
    usual = st.sampled_from(USUAL[datatype])
    any_element = st.sampled_from(USUAL[datatype] * 3 + NUMBERS + STRINGS + ODD)
    strange = draw(st.integers(0, 15)) == 0
    found = draw(st.integers(0, 4)) if strange else count
    texts = [draw(any_element if strange else usual) for _ in range(found)]
    space = draw(st.sampled_from(SPACES))
    text = f"[{space}{(space + ',' + space).join(texts)}{space}]"
    depth = draw(st.sampled_from([0] * 40 + [1, 2, 8, 9]))
    text = "[" * depth + text + "]" * depth
    broken: str = draw(st.sampled_from([text] * 60 + [text[:-1], text + "]", text + "\0", "1", "null"]))
    return broken


@st.composite
def frames(draw: Any) -> tuple[str, str, int]:
    """Return a datatype, a body with `%DATA` in place of data and `%ID` in place of the id, and its elements."""
    datatype = draw(st.sampled_from(sorted(USUAL)))
    count = draw(st.sampled_from([1, 2, 2, 3, 9]))
    colon = draw(st.sampled_from([":", ": ", " :\n"]))
    kserve = "BYTES" if datatype == "STRING" else datatype

    def joined(members: list[str]) -> str:
        comma: str = draw(st.sampled_from([",", ", ", "\n,"]))
        return "{" + comma.join(members) + "}"

    def member(name: str, value: str) -> str:
        return f'"{name}"{colon}{value}'

    names = {'"IN"': 40, '"\\u0049N"': 1, '"other"': 1}
    tensor = [
        member("name", draw(st.sampled_from([name for name, weight in names.items() for _ in range(weight)]))),
        member("datatype", f'"{draw(st.sampled_from([kserve] * 60 + ["FP16", "INT16", "x"]))}"'),
        member("shape", draw(st.sampled_from([f"[{count}]"] * 60 + [f"[1,{count}]", "[]", "[0]", "[-1]"]))),
        member("data", "%DATA"),
    ]
    tensor += draw(st.lists(st.sampled_from([
        member("data", "%DATA"), member("data", "[1]"), member("d\\u0061ta", "[1, 2]"), member("data2", "[1]"),
        member("parameters", '{"x": "\\"data\\": [1]"}'), member("parameters", '{"binary_data_size": 4}'),
    ]), max_size=1)) if draw(st.integers(0, 4)) == 0 else []  # fmt: skip
    tensors = [joined(draw(st.permutations(tensor)) if draw(st.booleans()) else tensor)]
    if draw(st.integers(0, 3)) == 0:
        second = ['"name": "data"', '"datatype": "INT32"', '"shape": [1]', '"data": %SECOND']
        tensors.insert(draw(st.integers(0, 1)), joined(second))
    members = [member("inputs", f"[{', '.join(tensors)}]")]
    more = [
        member("id", "%ID"), member("id", '"fixed"'), member("i\\u0064", '"other"'), member("unknown", '{"data": [1]}'),
        member("parameters", '{"priority": 1, "custom": "\\"data\\":"}'), member("parameters", '{"triton_x": 1}'),
        member("outputs", '[{"name": "IN"}]'),
        member("outputs", '[{"name": "IN", "parameters": {"binary_data": true}}]'),
        member("parameters", '{"binary_data_output": true}'), member("outputs", '[{"name": "nope"}]'),
    ]  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        members.insert(draw(st.integers(0, len(members))), draw(st.sampled_from(more)))
    body = joined(members)
    tail = draw(st.sampled_from([""] * 60 + [" ", "\0", "\0x", "x", "}"]))
    return datatype, draw(st.sampled_from([""] * 60 + ["\ufeff", " "])) + body + tail, count


@st.composite
def conversations(draw: Any) -> tuple[str, list[bytes]]:
    """Return a datatype and bodies that differ in what clients change, some of them broken anywhere."""
    datatype, frame, count = draw(frames())
    ids = st.sampled_from(['"1"', '"22"', '""', '"\\u0041"', '"ä"', '"\\"id\\""', "7", "null", '"}]}"', '"a'])
    bodies = []
    for _ in range(draw(st.integers(2, 4))):
        text = frame.replace("%ID", draw(ids)).replace(
            "%SECOND", draw(st.sampled_from(["[1]", "[-5]", "[1, 2]", "[1.5]"]))
        )
        while "%DATA" in text:
            text = text.replace("%DATA", draw(elements(datatype, count)), 1)
        octets = text.encode(errors="surrogatepass")
        if draw(st.integers(0, 15)) == 0:
            place = draw(st.integers(0, len(octets)))
            octets = (
                octets[:place]
                + draw(st.sampled_from([b"", b"\0", b'"', b"]", b"\xff", b",", b" "]))
                + octets[place + 1 :]
            )
        bodies.append(octets)
    return datatype, bodies


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@settings(max_examples=EXAMPLES)
@given(conversations())
def test_a_server_that_knows_such_requests_responds_as_one_that_does_not(
    lab: Lab, conversation: tuple[str, list[bytes]]
) -> None:
    datatype, bodies = conversation
    warm = HttpInference(lab.kernel, MAX_INPUT_SIZE)
    accepted = 0
    for body in (*bodies, *bodies):
        cold = HttpInference(lab.kernel, MAX_INPUT_SIZE)
        found = lab.response(warm, datatype, body)
        assert found == lab.response(cold, datatype, body)
        accepted += len(found[1])
    recognised = accepted - warm.prepared_bodies._json._unknown
    event(f"{min(accepted, 1)} or more requests accepted, {min(recognised, 1)} or more of them recognised")
