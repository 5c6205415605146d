"""JSON requests to a server with a model of each datatype, answered from prepared bodies and without."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.serving.response import Response
from protocols.http.fast.call import FastCall
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.prepared import InferRequestHead
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab
from tests.protocols.http.waiter import Waiter

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from protocols.http.inference.infer_call import HttpInference

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
