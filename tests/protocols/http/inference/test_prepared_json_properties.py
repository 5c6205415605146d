"""Whatever JSON comes, a server that has seen requests like it responds as one that sees its first request.

`NAIAD_EXAMPLES` is how many examples hypothesis makes; `make test-nightly` asks for many.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import text_format
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.serving.response import Response
from protocols.http.fast.call import FastCall
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.infer_call import HttpInference
from protocols.http.inference.prepared import InferRequestHead
from protocols.testing import FrontDoorLab
from shm.tensor import Tensor
from tests.protocols.http.waiter import Waiter

if TYPE_CHECKING:
    from kernel.serving.request import Request

EXAMPLES = int(os.environ.get("NAIAD_EXAMPLES", "2000"))
#: A small limit, so that some inputs are too large.
MAX_INPUT_SIZE = 64

CONFIG = """
name: "%(datatype)s" backend: "fake"
input [{ name: "IN" data_type: TYPE_%(datatype)s dims: [-1] }]
input [{ name: "data" data_type: TYPE_INT32 dims: [1] optional: true }]
output [{ name: "IN" data_type: TYPE_%(datatype)s dims: [-1] }, { name: "data" data_type: TYPE_INT32 dims: [1] }]
"""

NUMBERS = [
    "0", "-0", "1", "-1", "1.0", "0.1", "-1.5e3", "1E2", "127", "128", "-128", "-129", "255", "256", "32767", "-32769",
    "65535", "65536", "2147483647", "2147483648", "-2147483648", "-2147483649", "4294967295", "4294967296",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "18446744073709551615", "18446744073709551616", "1e16", "1e-7", "5e-324", "1e-400", "3.4028234663852886e38",
    "3.5e38", "-1e39", "1.7976931348623157e308", "1e309", "1" + "0" * 310, "NaN", "-NaN", "Inf", "Infinity",
    "-Infinity", "01", "1.", ".5", "+1", "1e", "--1", "0x1",
]  # fmt: skip
STRINGS = [
    '""', '"a"', '"NaN"', '"\\u00e4\\n"', '"ä"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\x"', '"]"', '"}]}"',
    '"\\"data\\":[1]"', '"\\\\"', '"\\u0000"', '"\\u0000hole 0"', '"data"', '"a',
]  # fmt: skip
ODD = ["true", "false", "null", "{}", "[]", '{"data": [1]}', "tru", ""]

#: What the elements of a tensor usually are in JSON, by datatype: of these, wrong ones are a minority.
USUAL = {
    "BOOL": ["true", "false"],
    "STRING": STRINGS[:6],
    "FP32": NUMBERS[:30],
    "FP64": NUMBERS[:30],
    "UINT8": ["0", "1", "255", "256", "65537"],
    "INT8": ["0", "-1", "127", "-128", "128"],
    "INT32": ["0", "-1", "7", "2147483647", "2147483648"],
    "INT64": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "UINT64": ["0", "1", "18446744073709551615"],
}
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


class Lab:
    """A kernel with a model of each datatype that returns its inputs, and what it was asked."""

    def __init__(self) -> None:
        self.front_door = FrontDoorLab()
        self.kernel = self.front_door.kernel
        self.submitted: list[object] = []
        for datatype in USUAL:
            spec = model_spec(
                text_format.Parse(CONFIG.replace('"echo"', f'"{datatype}"') % {"datatype": datatype}, ModelConfig())
            )
            self.front_door.add_model(spec, self._respond)

    def _respond(self, request: Request) -> None:
        inputs = [(each.name, each.datatype, list(each.shape), bytes(each.data or b"")) for each in request.inputs]
        outputs = [(each.name, each.classification) for each in request.outputs]
        self.submitted.append((inputs, outputs, request.id, request.parameters, request.priority, request.byte_size))
        wanted = [name for name, _ in outputs]
        response = Response(request.model_name, "1", request.id, parameters=dict(request.parameters))
        response.outputs = [
            Tensor(name, datatype, shape, data)
            for name, datatype, shape, data in inputs
            if not wanted or name in wanted
        ]
        request.respond(response)

    def response(self, inference: HttpInference, model: str, body: bytes) -> tuple[object, list[object]]:
        """Return the whole response without its date, and what the model was asked."""
        self.submitted.clear()
        head = InferRequestHead(self.kernel.route(model), model, "", f"/{model}", len(body), len(body), IDENTITY)
        call = FastCall(inference, head, Waiter())
        call.start(body)
        assert call.response is not None
        octets = b"".join((call.response.head, *call.response.parts))
        return re.sub(rb"Date: [^\r]*", b"", octets), list(self.submitted)


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
