from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python.failures import TritonModelException
from backends.python.requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
)
from backends.python.tensors import Tensor
from kernel.errors import InternalError

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab


def shown(lab: Lab, expression: str, **config: Any) -> None:
    """Load a model that returns the value of `expression`."""
    lab.load(
        f"""
        def execute(self, requests):
            request = requests[0]
            return [text({expression})]
        """,
        **config,
    )


# ---- requests of clients --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "{}"),
        ({"a": 1, "b": True, "c": 'x"y', "z": -5}, '{"a":1,"b":true,"c":"x\\"y","z":-5}'),
        ({"z": 1, "f": 1.5}, '{"z":1,"f":1.5}'),
        ({"ü": "ü", "line": "a\nb", "big": 2**53 + 1}, '{"ü":"ü","line":"a\\nb","big":9007199254740993}'),
    ],
)
def test_parameters_are_json_as_triton_prints_it(
    lab: Lab, parameters: dict[str, str | int | bool | float], text: str
) -> None:
    shown(lab, "request.parameters()")
    assert lab.text(parameters=parameters) == text


def test_a_request_without_options_has_triton_s_defaults(lab: Lab) -> None:
    shown(
        lab,
        "(request.request_id(), request.correlation_id(), request.flags(), request.timeout(),"
        " request.inputs(), request.is_cancelled(), request.trace().get_context())",
    )
    assert lab.text() == str(("", 0, 0, 0, [], False, None))


def test_without_requested_outputs_all_configured_ones_are_requested(lab: Lab) -> None:
    shown(lab, "sorted(request.requested_output_names())", output=[{"name": "OUT"}, {"name": "MORE"}])
    assert lab.text() == "['MORE', 'OUT']"
    assert lab.text(outputs=["OUT"]) == "['OUT']"


def test_only_the_outputs_that_the_client_names_are_requested(lab: Lab) -> None:
    shown(lab, "sorted(request.requested_output_names())", output=[{"name": name} for name in ("A", "OUT")])
    assert lab.text(outputs=["OUT"]) == "['OUT']"


def test_an_input_is_found_by_its_name(lab: Lab) -> None:
    shown(
        lab,
        "[pb_utils.get_input_tensor_by_name(request, name) is found for name, found in "
        "zip(['A', 'B', 'C'], [*request.inputs(), None])]",
    )
    inputs = {"A": np.ones(1, np.int32), "B": np.ones(1, np.int32)}
    assert str(lab.run(inputs).outputs["OUT"][0].decode()) == "[True, True, True]"


def test_inputs_and_sender_are_the_same_objects_each_time(lab: Lab) -> None:
    shown(
        lab,
        "(request.inputs()[0] is request.inputs()[0], request.inputs() is request.inputs(),"
        " request.get_response_sender() is request.get_response_sender())",
    )
    request = lab.request({"IN": np.zeros(1, np.int8)})
    lab.execute(request)
    assert lab.response(request).outputs["OUT"][0] == b"(True, False, True)"


def test_flags_can_be_set(lab: Lab) -> None:
    shown(lab, "(request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END), request.flags())")
    assert lab.text() == "(None, 2)"


_RESCHEDULING = """
def execute(self, requests):
    for request in requests:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    return RETURNED
"""


def test_a_request_that_is_rescheduled_is_given_back(lab: Lab) -> None:
    source = _RESCHEDULING.replace("RETURNED", "[None]")
    lab.load(source, sequence_batching={"iterative_sequence": True})
    request = lab.request()
    lab.execute(request)
    assert lab.rescheduled == [request]


def test_a_decoupled_model_reschedules_by_returning_nothing(lab: Lab) -> None:
    source = _RESCHEDULING.replace("RETURNED", "None")
    lab.load(source, decoupled=True, max_batch_size=2, sequence_batching={"iterative_sequence": True})
    requests = [lab.request(), lab.request()]
    lab.execute(*requests)
    assert lab.rescheduled == requests


def test_a_rescheduled_request_must_have_no_response(lab: Lab) -> None:
    source = _RESCHEDULING.replace("RETURNED", "[text('x')]")
    lab.load(source, sequence_batching={"iterative_sequence": True})
    with pytest.raises(InternalError, match="Expected a None object in the execute function return list for reschdul"):
        lab.execute(lab.request())
    assert not lab.rescheduled


def test_a_model_without_iterative_sequences_cannot_reschedule(lab: Lab) -> None:
    lab.load(_RESCHEDULING.replace("RETURNED", "[None]"))
    request = lab.request()
    lab.execute(request)
    assert lab.response(request).error.message == (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
        "handle such a flag."
    )


# ---- requests that a model creates ----------------------------------------------------------


def test_a_request_of_a_model_returns_its_constructor_arguments() -> None:
    tensor = Tensor("IN", np.zeros(1))
    trace = InferenceTrace('{"traceparent": "00-1-2-01"}')
    request = InferenceRequest(
        request_id="id",
        correlation_id="seq",
        inputs=[tensor],
        requested_output_names=["B", "A"],
        model_name="m",
        model_version=2,
        flags=3,
        timeout=5,
        preferred_memory=PreferredMemory(TRITONSERVER_MEMORY_CPU),
        trace=trace,
        parameters={"b": True, "a": 1, "c": "x"},
    )
    assert (request.request_id(), request.correlation_id(), request.inputs()) == ("id", "seq", [tensor])
    assert request.requested_output_names() == {"A", "B"}
    assert (request.flags(), request.timeout()) == (3, 5)
    assert request.parameters() == '{"b": true, "a": 1, "c": "x"}'
    assert request.trace() is trace
    assert trace.get_context() == '{"traceparent": "00-1-2-01"}'
    assert request.get_response_sender() is None
    assert not request.is_cancelled()


def test_a_request_takes_what_the_binding_of_triton_converts() -> None:
    names = np.array([b"callee", "B", 7], np.object_)
    request = InferenceRequest(
        request_id=bytearray(b"id"),  # type: ignore[arg-type]
        inputs=[Tensor(b"IN", np.zeros(1))],  # type: ignore[arg-type]
        requested_output_names=[names[1], b"A", np.str_("C"), np.bytes_(b"D")],  # type: ignore[list-item]
        model_name=names[0],
        model_version=np.int32(2),  # type: ignore[arg-type]
        flags=np.uint8(3),  # type: ignore[arg-type]
        timeout=np.int64(5),  # type: ignore[arg-type]
    )
    assert (request.request_id(), request.inputs()[0].name()) == ("id", "IN")
    assert request.requested_output_names() == {"A", "B", "C", "D"}
    sent = request._call_request(False, "exec")
    assert (sent.model_name, sent.model_version, sent.flags, sent.timeout_us) == ("callee", "2", 3, 5)
    assert {type(each) for each in (sent.model_name, *sent.outputs, sent.id)} == {str}
    assert (type(sent.flags), type(sent.timeout_us)) == (int, int)


@pytest.mark.parametrize("wrong", [{"model_version": 1.0}, {"flags": -1}, {"flags": 1 << 32}, {"timeout": 1 << 64}])
def test_numbers_that_do_not_fit_are_type_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        InferenceRequest(inputs=[], requested_output_names=[], model_name="m", **wrong)


def test_a_correlation_id_must_be_an_integer_or_a_string() -> None:
    with pytest.raises(TritonModelException, match=r"^Correlation ID must be integer or string$"):
        InferenceRequest("", 1.5, [], [], "m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": None},
        {"inputs": [5]},
        {"requested_output_names": None},
        {"requested_output_names": [None]},
        {"requested_output_names": "A"},
        {"model_name": None},
        {"request_id": None},
        {"correlation_id": None},
        {"model_version": None},
        {"flags": None},
        {"timeout": None},
        {"preferred_memory": 1},
        {"trace": 1},
        {"correleation_id": 1},
    ],
)
def test_arguments_of_wrong_types_are_type_errors(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    InferenceRequest(**right)
    with pytest.raises(TypeError):
        InferenceRequest(**right | wrong)


@pytest.mark.parametrize("absent", ["inputs", "requested_output_names", "model_name"])
def test_model_inputs_and_outputs_must_be_given(absent: str) -> None:
    given: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    del given[absent]
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        InferenceRequest(**given)


def test_none_among_the_inputs_has_the_error_of_triton() -> None:
    with pytest.raises(
        TritonModelException, match="^Input tensor for request with id '7' and model name 'm' should not"
    ):
        InferenceRequest("7", 0, [None], [], "m")  # type: ignore[list-item]


def test_preferred_memory_must_be_one_of_the_constants() -> None:
    PreferredMemory(TRITONSERVER_MEMORY_GPU, 1)
    assert (int(TRITONSERVER_MEMORY_GPU), int(TRITONSERVER_MEMORY_CPU)) == (0, 1)
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        PreferredMemory("GPU")  # type: ignore[arg-type]
