"""Functions of a test answer the calls that a model makes to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.python.testing import CallInputs, ServingError, load_model
from kernel.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends.python.conftest import WriteModel

CALL = """
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            call = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", given.as_numpy())],
                request_id="7", parameters={"a": 1})
            answer = call.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                found = pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]))
        return responses
"""

ASYNC = """
    async def execute(self, requests):
        import asyncio

        def call(request):
            inputs = [pb_utils.Tensor("X", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())]
            return pb_utils.InferenceRequest(
                model_name="other", requested_output_names=["Y"], inputs=inputs).async_exec()

        answers = await asyncio.gather(*(call(request) for request in requests))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer.output_tensors()[0].as_numpy())])
            for answer in answers
        ]
"""

STREAM = """
    def execute(self, requests):
        (request,) = requests
        call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["Y"], inputs=[])
        total = np.zeros(1, np.float32)
        for answer in call.exec(decoupled=True):
            if answer.has_error():
                return [pb_utils.InferenceResponse(error=answer.error())]
            for tensor in answer.output_tensors():
                total += tensor.as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)])]
"""

DOUBLE = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2)])
            for request in requests
        ]
"""


def test_a_function_answers_the_calls_of_a_model(write_model: WriteModel) -> None:
    seen: list[CallInputs] = []

    def other(call: CallInputs) -> dict[str, object]:
        seen.append(call)
        return {"Y": call["X"] + 1}

    with load_model(write_model(CALL), calls={"other": other}) as model:
        assert model.infer({"IN": [1, 2]})["OUT"].tolist() == [2, 3]
    (call,) = seen
    assert (call.model_name, call.request_id, call.parameters) == ("other", "7", {"a": 1})
    assert (call.requested_output_names, call.decoupled) == (("Y",), False)


def test_a_coroutine_awaits_several_calls(write_model: WriteModel) -> None:
    with load_model(write_model(ASYNC), calls={"other": lambda call: {"Y": call["X"] * 10}}) as model:
        assert model.infer({"IN": [1, 2]})["OUT"].tolist() == [10, 20]


def test_an_error_of_the_function_is_the_error_of_the_call(write_model: WriteModel) -> None:
    def other(call: CallInputs) -> object:
        raise NotFound("no such user")

    with load_model(write_model(CALL), calls={"other": other}) as model, pytest.raises(NotFound, match="no such user"):
        model.infer({"IN": [1]})


def test_a_generator_answers_as_a_decoupled_model(write_model: WriteModel) -> None:
    def other(call: CallInputs) -> Iterator[dict[str, object]]:
        assert call.decoupled
        for number in range(4):
            yield {"Y": np.full(1, number, np.float32)}

    with load_model(write_model(STREAM), calls={"other": other}) as model:
        assert model.infer({"IN": [1]})["OUT"].tolist() == [6]


def test_a_generator_may_fail_on_its_way(write_model: WriteModel) -> None:
    def other(call: CallInputs) -> Iterator[dict[str, object]]:
        yield {"Y": np.ones(1, np.float32)}
        raise NotFound("no more")

    with load_model(write_model(STREAM), calls={"other": other}) as model, pytest.raises(NotFound, match="no more"):
        model.infer({"IN": [1]})


def test_another_loaded_model_may_answer(write_model: WriteModel) -> None:
    double = write_model(DOUBLE, name="double")
    with (
        load_model(double) as other,
        load_model(
            write_model(CALL), calls={"other": lambda call: {"Y": other.infer({"IN": call["X"]})["OUT"]}}
        ) as model,
    ):
        assert model.infer({"IN": [1, 2]})["OUT"].tolist() == [2, 4]
        assert model.infer({"IN": [3]})["OUT"].tolist() == [6]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({}, "the model calls model 'other', for which the test has no function; it has: none"),
        ({"other": lambda call: 5}, "must return a dict of outputs, or an iterable of such, not int"),
        ({"other": lambda call: [1]}, "a response of a called model is a dict of outputs, not int"),
        ({"other": lambda call: [{}, {}]}, "model 'other' sent 2 responses to a call that accepts one"),
    ],
)
def test_a_call_that_the_test_cannot_answer_fails_the_request(
    write_model: WriteModel, calls: dict[str, object], said: str
) -> None:
    with load_model(write_model(CALL), calls=calls) as model, pytest.raises(ServingError, match=said):  # type: ignore[arg-type]
        model.infer({"IN": [1]})


def test_what_a_model_does_with_other_models_is_recorded(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        pb_utils.load_model("other")
        ready = [pb_utils.is_model_ready(name) for name in ("other", "third")]
        pb_utils.unload_model("other")
        array = np.array(ready, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for request in requests]
    """
    with load_model(write_model(methods), calls={"other": lambda call: {}}) as model:
        assert model.infer({"IN": [1]})["OUT"].tolist() == [1, 0]
        assert model.controlled == [("load", "other"), ("ready", "other"), ("ready", "third"), ("unload", "other")]
