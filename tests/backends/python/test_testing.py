"""Authors' tests: a Python model in the process of the test, with the rules of a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.python.testing import ModelResponse, ServingError, load_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.python.conftest import WriteModel

DOUBLE = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2)])
            for request in requests
        ]
"""

BATCHED = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""

DECOUPLED = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""

TEXT = """
backend: "python"
input [ { name: "IN" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""

SEQUENCE = """
backend: "python"
sequence_batching {
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }
  ]
  state [ { input_name: "SUM_IN" output_name: "SUM" data_type: TYPE_FP32 dims: [ 1 ]
            initial_state: { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } ]
}
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


# ---- loading ---------------------------------------------------------------------------------


def test_a_model_doubles_its_input(write_model: WriteModel) -> None:
    with load_model(write_model(DOUBLE)) as model:
        assert model.infer({"IN": np.array([1, 2, 3], np.float32)})["OUT"].tolist() == [2, 4, 6]
        assert model.infer({"IN": [1, 2]})["OUT"].dtype == np.float32, "a list has the datatype of the model"


def test_the_completed_configuration_can_be_read(write_model: WriteModel) -> None:
    methods = (
        """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config
"""
        + DOUBLE
    )
    with load_model(write_model(methods, 'backend: "python"')) as model:
        assert [tensor["name"] for tensor in model.config["input"]] == ["IN"]
        assert model.infer({"IN": [1]})["OUT"].tolist() == [2]


def test_fields_and_parameters_of_the_configuration_can_be_replaced(write_model: WriteModel) -> None:
    methods = """
    def initialize(self, args):
        import json

        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])

    def execute(self, requests):
        (request,) = requests
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * np.float32(self.factor))])]
    """
    folder = write_model(methods)
    with load_model(folder, parameters={"factor": "3"}, config={"max_batch_size": 2}) as model:
        assert model.infer({"IN": [[1, 2]]})["OUT"].tolist() == [[3, 6]]


def test_the_newest_version_is_loaded_unless_another_one_is_named(write_model: WriteModel) -> None:
    write_model(DOUBLE.replace("* 2", "* 10"), version=1)
    folder = write_model(DOUBLE, 'version_policy { all { } }\nbackend: "python"\n' + BATCHED[18:], version=2)
    with load_model(folder) as newest, load_model(folder, version=1) as first:
        assert newest.infer({"IN": [[1, 1]]})["OUT"].tolist() == [[2, 2]]
        assert first.infer({"IN": [[1, 1]]})["OUT"].tolist() == [[10, 10]]
    with pytest.raises(ServingError, match="has no version 3, only 1, 2"):
        load_model(folder, version=3)


@pytest.mark.parametrize(
    ("methods", "config", "said"),
    [
        (DOUBLE, 'backend: "onnxruntime"', "load_model runs Python models only"),
        (DOUBLE, 'backend: "python"\nmax_batch_size: many', "config.pbtxt:2:17"),
        ("    def initialize(self, args):\n        raise ValueError('no weights')", TEXT, "ValueError: no weights"),
        ("    x = (", TEXT, "SyntaxError"),
    ],
)
def test_a_model_that_a_server_could_not_load_raises_the_reason(
    write_model: WriteModel, methods: str, config: str, said: str
) -> None:
    with pytest.raises(ServingError, match=said):
        load_model(write_model(methods, config))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no such folder"):
        load_model(tmp_path / "nothing")


def test_models_with_modules_of_the_same_name_do_not_meet(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        import beside

        array = np.array([beside.NUMBER], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for request in requests]
    """
    folders = [write_model(methods, name=name) for name in ("first", "second")]
    for number, folder in enumerate(folders):
        (folder / "1" / "beside.py").write_text(f"NUMBER = {number}\n")
    before, arguments = set(sys.modules), sys.argv
    with load_model(folders[0]) as first, load_model(folders[1]) as second:
        found = [model.infer({"IN": [0]})["OUT"].tolist() for model in (first, second, first)]
    assert found == [[0], [1], [0]]
    assert "beside" not in sys.modules
    assert not any(name.startswith("1.") for name in set(sys.modules) - before)
    assert sys.argv is arguments


def test_finalize_is_called_once_at_the_end(write_model: WriteModel, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    methods = f"""
    def finalize(self):
        with open({str(ended)!r}, "a") as file:
            file.write("x")
    """
    with load_model(write_model(methods + DOUBLE)) as model:
        assert not ended.exists()
    model.close()
    assert ended.read_text() == "x"
    with pytest.raises(ServingError, match="is closed"):
        model.infer({"IN": [1]})


# ---- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"IN": np.zeros(2, np.float64)}, "data-type is 'FP64', but model 'lab' expects 'FP32'"),
        ({"IN": np.zeros((2, 2), np.float32)}, r"Expected \[-1\], got \[2,2\]"),
        ({"WRONG": [1]}, "WRONG"),
        ({}, "missing required input"),
        ({"IN": ["a"]}, "input 'IN' is not an array of FP32"),
    ],
)
def test_a_request_that_a_server_refuses_raises_its_text(
    write_model: WriteModel, inputs: dict[str, object], said: str
) -> None:
    with load_model(write_model(DOUBLE)) as model, pytest.raises(ServingError, match=said):
        model.infer(inputs)


def test_a_batch_is_one_call_of_execute_and_each_request_has_its_response(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if given[0, 0] < 0:
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                tensor = pb_utils.Tensor("OUT", given + len(requests))
                responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
    """
    with load_model(write_model(methods, BATCHED)) as model:
        first, second, third = model.infer_batch([{"IN": [[1, 1]]}, {"IN": [[-1, 0]]}, {"IN": [[5, 5], [6, 6]]}])
    assert isinstance(first, ModelResponse)
    assert first["OUT"].tolist() == [[4, 4]]
    assert isinstance(second, ServingError)
    assert second.message == "negative"
    assert isinstance(third, ModelResponse)
    assert third["OUT"].tolist() == [[8, 8], [9, 9]]


def test_strings_go_in_and_come_out_as_bytes(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        (request,) = requests
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        upper = np.array([each.upper() for each in given], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", upper)])]
    """
    with load_model(write_model(methods, TEXT)) as model:
        assert model.infer({"IN": ["grün", b"\xff"]})["OUT"].tolist() == ["GRüN".encode(), b"\xff"]


def test_parameters_and_ids_reach_the_model_and_come_back(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        import json

        (request,) = requests
        parameters = json.loads(request.parameters()) | {"id": request.request_id(), "timeout": request.timeout()}
        assert request.requested_output_names() == {"OUT"}
        tensor = pb_utils.Tensor("OUT", np.zeros(1, np.float32))
        return [pb_utils.InferenceResponse([tensor], parameters=parameters)]
    """
    with load_model(write_model(methods)) as model:
        response = model.infer(
            {"IN": [1]}, parameters={"a": 1, "b": "x"}, request_id="7", outputs=["OUT"], timeout_us=5
        )
    assert response.parameters == {"a": 1, "b": "x", "id": "7", "timeout": 5}


def test_the_model_may_change_its_input_but_not_the_array_of_the_test(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        (request,) = requests
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        given += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])]
    """
    array = np.zeros(5000, np.float32)
    with load_model(write_model(methods)) as model:
        assert model.infer({"IN": array})["OUT"].sum() == 5000
    assert array.sum() == 0


# ---- responses -------------------------------------------------------------------------------


def test_a_decoupled_model_streams_also_from_a_thread(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        import threading

        for request in requests:
            threading.Thread(target=self.respond, args=(request,)).start()

    def respond(self, request):
        sender = request.get_response_sender()
        for number in range(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    with load_model(write_model(methods, DECOUPLED)) as model:
        assert [response["OUT"].tolist() for response in model.stream({"IN": [3]})] == [[0], [1], [2]]
        assert list(model.stream({"IN": [0]})) == []
        with pytest.raises(ServingError, match="sent 3 responses"):
            model.infer({"IN": [3]})


def test_a_cancelled_request_tells_its_model(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        import threading

        for request in requests:
            threading.Thread(target=self.respond, args=(request.get_response_sender(),)).start()

    def respond(self, sender):
        import time

        while not sender.is_cancelled():
            time.sleep(0.001)
        error = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    with load_model(write_model(methods, DECOUPLED)) as model:
        stream = model.stream({"IN": [3]})
        stream.cancel()
        with pytest.raises(ServingError, match="stopped"):
            next(stream)


def test_a_coroutine_is_awaited(write_model: WriteModel) -> None:
    methods = """
    async def execute(self, requests):
        import asyncio

        await asyncio.sleep(0)
        tensor = pb_utils.Tensor("OUT", np.ones(1, np.float32))
        return [pb_utils.InferenceResponse([tensor]) for request in requests]
    """
    with load_model(write_model(methods)) as model:
        assert model.infer({"IN": [0]})["OUT"].tolist() == [1]


def test_an_exception_of_the_model_is_the_cause_of_the_error(write_model: WriteModel) -> None:
    with load_model(write_model("    def execute(self, requests):\n        raise KeyError('gone')")) as model:
        with pytest.raises(ServingError, match="KeyError: 'gone'") as caught:
            model.infer({"IN": [0]})
        assert isinstance(caught.value.__cause__, KeyError)
        assert model.logged[0][0] == "ERROR"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("np.zeros(1)", r"sent output 'OUT' as FP64, but its configuration says FP32 \(data_type\)"),
        ("np.zeros((1, 1), np.float32)", r"with shape \[1,1\], but its configuration says \[-1\] \(dims\)"),
    ],
)
def test_an_output_that_the_configuration_does_not_allow_is_an_error(
    write_model: WriteModel, made: str, said: str
) -> None:
    methods = f"""
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {made})]) for request in requests]
    """
    with load_model(write_model(methods)) as model, pytest.raises(ServingError, match=said):
        model.infer({"IN": [0]})


def test_a_model_that_never_sends_a_final_response_is_a_timeout(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        self.kept = requests
    """
    with load_model(write_model(methods, DECOUPLED)) as model:
        stream = model.stream({"IN": [1]}, client_timeout=0.01)
        with pytest.raises(TimeoutError, match=r"did not send its final response within 0.01 s"):
            next(stream)


# ---- sequences -------------------------------------------------------------------------------


def test_a_sequence_has_its_controls_and_its_state(write_model: WriteModel) -> None:
    methods = """
    def execute(self, requests):
        (request,) = requests
        given, state, start = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "SUM_IN", "START"))
        total = given + state * (1 - start)
        tensors = [pb_utils.Tensor("OUT", total.astype(np.float32)), pb_utils.Tensor("SUM", total.astype(np.float32))]
        return [pb_utils.InferenceResponse(tensors)]
    """
    with load_model(write_model(methods, SEQUENCE)) as model:
        totals = [
            model.infer({"IN": [value]}, correlation_id=id, sequence_start=start, sequence_end=end)["OUT"].tolist()
            for id, value, start, end in ((1, 1, True, False), (2, 10, True, False), (1, 2, False, True),
                                          (2, 5, False, False), (1, 7, True, False))
        ]  # fmt: skip
        assert totals == [[1], [10], [3], [15], [7]]
        with pytest.raises(ServingError, match="must specify the START flag"):
            model.infer({"IN": [1]}, correlation_id=9)
        with pytest.raises(ServingError, match="non-zero or non-empty correlation ID"):
            model.infer({"IN": [1]})


def test_a_request_that_is_rescheduled_is_executed_again(write_model: WriteModel) -> None:
    config = """
    backend: "python"
    sequence_batching { iterative_sequence: true }
    model_transaction_policy { decoupled: true }
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
    """
    methods = """
    count = 0

    def execute(self, requests):
        (request,) = requests
        self.count += 1
        sender = request.get_response_sender()
        last = self.count == pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.count], np.int32))])
        if last:
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(response)
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    """
    with load_model(write_model(methods, config)) as model:
        stream = model.stream({"IN": [3]}, correlation_id=1, sequence_start=True, sequence_end=True)
        assert [response["OUT"].tolist() for response in stream] == [[1], [2], [3]]
