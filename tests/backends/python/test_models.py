"""Complete models of the usual kinds; Triton runs them unchanged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    NotFound,
    RequestCancelled,
    Unavailable,
    UnknownError,
    Unsupported,
)
from shm.arrays import NUMPY_TYPES

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from tests.backends.python.conftest import Lab

ADD_SUB = """
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = tensor(request, "INPUT0"), tensor(request, "INPUT1")
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]))
        return responses
"""

ECHO = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor(r, "IN"))]) for r in requests]
"""

FAIL = """
    def execute(self, requests):
        responses = []
        for request in requests:
            kind = tensor(request, "KIND").flatten()[0].decode()
            code = getattr(pb_utils.TritonError, kind.upper())
            error = pb_utils.TritonError("asked for " + kind, code)
            responses.append(pb_utils.InferenceResponse(error=error))
        return responses
"""

REPEAT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in tensor(request, "IN").flatten():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""

ACCUMULATE = """
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            start, end = tensor(request, "START").flatten()[0], tensor(request, "END").flatten()[0]
            corrid = tensor(request, "CORRID").flatten()[0]
            if start:
                self.totals[corrid] = 0
            self.totals[corrid] = self.totals.get(corrid, 0) + int(tensor(request, "IN").flatten()[0])
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.array([[self.totals[corrid]]], np.int32))]))
            if end:
                del self.totals[corrid]
        return responses
"""

PARAMS = """
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {
                "id": request.request_id(), "correlation_id": request.correlation_id(),
                "wanted": sorted(request.requested_output_names()), "flags": request.flags(),
                "parameters": json.loads(request.parameters()), "timeout": request.timeout(),
            }
            responses.append(text(json.dumps(seen)))
        return responses
"""


def test_add_sub(lab: Lab) -> None:
    lab.load(ADD_SUB, output=[{"name": "OUTPUT0"}, {"name": "OUTPUT1"}], max_batch_size=8)
    ramp, ones = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    requests = [lab.request({"INPUT0": ramp, "INPUT1": factor * ones}) for factor in (1, 2)]
    lab.execute(*requests)
    for request, factor in zip(requests, (1, 2), strict=True):
        response = lab.response(request)
        assert np.array_equal(response.outputs["OUTPUT0"], ramp + factor)
        assert np.array_equal(response.outputs["OUTPUT1"], ramp - factor)
        assert set(response.datatypes.values()) == {"INT32"}


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
def test_every_datatype_is_supported(lab: Lab, datatype: str) -> None:
    lab.load(ECHO)
    given = np.array([[0, 1]]).astype(NUMPY_TYPES[datatype])
    response = lab.run({"IN": given})
    assert response.datatypes["OUT"] == datatype
    assert np.array_equal(response.outputs["OUT"], given)


def test_strings_are_bytes(lab: Lab) -> None:
    lab.load(ECHO)
    response = lab.run({"IN": np.array([b"a", "søn".encode(), b"\0"], object)})
    assert response.datatypes["OUT"] == "BYTES"
    assert response.outputs["OUT"].tolist() == [b"a", "søn".encode(), b"\0"]


@pytest.mark.parametrize(
    "kind",
    [
        UnknownError,
        InternalError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        RequestCancelled,
    ],
)
def test_a_model_can_return_each_of_triton_s_errors(lab: Lab, kind: type[ServingError]) -> None:
    lab.load(FAIL)
    name = kind.code.value
    error = lab.run({"KIND": np.array([name.encode()], object)}).error
    assert (type(error), error.message) == (kind, f"asked for {name}")


def test_a_decoupled_model_sends_any_number_of_responses(lab: Lab) -> None:
    lab.load(REPEAT, decoupled=True)
    request = lab.request({"IN": np.array([3, 1, 2], np.int32)})
    lab.execute(request)
    *responses, last = lab.responses(request)
    assert [response.outputs["OUT"].tolist() for response in responses] == [[3], [1], [2]]
    assert not any(response.final for response in responses)
    assert last.empty


def test_a_model_can_keep_the_state_of_sequences(lab: Lab) -> None:
    lab.load(ACCUMULATE)

    def step(sequence: int, value: int, *, start: bool = False, end: bool = False) -> int:
        response = lab.run(
            {
                "IN": np.array([[value]], np.int32),
                "START": np.array([[start]], np.int32),
                "END": np.array([[end]], np.int32),
                "CORRID": np.array([[sequence]], np.uint64),
            }
        )
        return int(response.outputs["OUT"][0, 0])

    assert [step(7, 1, start=True), step(8, 10, start=True), step(7, 2), step(7, 3, end=True)] == [
        1,
        10,
        3,
        6,
    ]


def test_a_model_can_read_all_properties_of_its_request(lab: Lab) -> None:
    lab.load(PARAMS)
    seen = lab.text(
        id="abc",
        outputs=["OUT"],
        flags=3,
        correlation_id="seq",
        timeout_us=77,
        parameters={"tenant": "blue", "level": 3, "dry": True},
    )
    assert json.loads(seen) == {
        "id": "abc",
        "correlation_id": "seq",
        "wanted": ["OUT"],
        "flags": 3,
        "parameters": {"tenant": "blue", "level": 3, "dry": True},
        "timeout": 77,
    }


def test_an_async_execute_is_awaited(lab: Lab) -> None:
    source = """
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                loops = await asyncio.gather(*(self.one() for _ in requests))
                assert len(set(loops)) == 1
                return [text(r.request_id()) for r in requests]

            async def one(self):
                await asyncio.sleep(0)
                return asyncio.get_running_loop()
    """
    lab.load(source, max_batch_size=4)
    requests = [lab.request(id=name) for name in "ab"]
    lab.execute(*requests)
    assert [lab.response(request).outputs["OUT"][0] for request in requests] == [b"a", b"b"]


def test_an_async_execute_that_raises_fails_its_batch(lab: Lab) -> None:
    lab.load("""
        async def execute(self, requests):
            1 / 0
    """)
    with pytest.raises(InternalError) as caught:
        lab.execute(lab.request())
    message = caught.value.message
    assert message.startswith(
        "Failed to process the request(s) for model 'lab_0_0', message: ZeroDivisionError: division by zero\n\nAt:\n"
    )
    assert message.endswith("): execute\n")
    assert message.count("\n  ") == 1


def test_a_decoupled_async_execute_continues_after_the_batch(lab: Lab) -> None:
    lab.load(
        """
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                self.event = asyncio.Event()

            async def execute(self, requests):
                if requests[0].request_id() == "open":
                    self.event.set()
                await self.event.wait()
                for request in requests:
                    request.get_response_sender().send(text(request.request_id()), flags=1)
        """,
        decoupled=True,
    )
    waiting, opening = lab.request(id="wait"), lab.request(id="open")
    lab.execute(waiting)
    assert not waiting.finished
    lab.execute(opening)
    assert lab.response(waiting).outputs["OUT"][0] == b"wait"
    assert lab.response(opening).outputs["OUT"][0] == b"open"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero\n\nAt:\n"),
        (
            "return 5",
            "Python model 'lab_0_0' is using the decoupled mode and the execute function must return",
        ),
    ],
)
def test_a_decoupled_async_execute_that_fails_ends_its_open_requests(lab: Lab, statement: str, reason: str) -> None:
    lab.load(
        f"""
        async def execute(self, requests):
            requests[0].get_response_sender().send(text("responded"), flags=1)
            requests[1].get_response_sender().send(text("begun"))
            {statement}
        """,
        decoupled=True,
        max_batch_size=4,
    )
    responded, begun = lab.request(), lab.request()
    lab.execute(responded, begun)
    assert lab.response(responded).error is None
    _, last = lab.responses(begun)
    assert last.error.message.startswith(f"Failed to process the request(s) for model 'lab_0_0', message: {reason}")
