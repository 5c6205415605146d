"""Implicit state: the server keeps outputs of a sequence's request as inputs of its next one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper

from bench.server import ServerProcess
from tests.end_to_end import silero

if TYPE_CHECKING:
    from pathlib import Path

    from shm.arrays import Array
    from tests.end_to_end.conftest import WriteModel

SILERO = """
backend: "onnxruntime"
max_batch_size: 0
input [{ name: "input" data_type: TYPE_FP32 dims: [-1, -1] }, { name: "sr" data_type: TYPE_INT64 dims: [1] }]
output [{ name: "output" data_type: TYPE_FP32 dims: [-1, 1] }]
instance_group [{ kind: KIND_CPU count: 2 }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  %s
  state [{
    input_name: "state" output_name: "stateN" data_type: TYPE_FP32 dims: [2, 1, 128]
    initial_state { name: "zero" data_type: TYPE_FP32 dims: [2, 1, 128] zero_data: true }
  }]
}
"""


def by_hand(recording: Array) -> list[float]:
    """Return the probabilities that plain ONNX Runtime finds, with the state carried by hand."""
    session = ort.InferenceSession(silero.model_file(), providers=["CPUExecutionProvider"])
    state = np.zeros((2, 1, 128), np.float32)
    found = []
    for frame in silero.frames(recording):
        inputs = {"input": frame[None], "state": state, "sr": np.array(silero.RATE, np.int64)}
        probability, state = session.run(None, inputs)
        found.append(float(probability.item()))
    return found


def by_server(url: str, model: str, sequence: int, recording: Array) -> list[float]:
    """Return the probabilities that the server finds for one sequence."""
    found = []
    rows = silero.frames(recording)
    with triton_http.InferenceServerClient(url, network_timeout=60) as client:
        for index, frame in enumerate(rows):
            given = triton_http.InferInput("input", [1, len(frame)], "FP32")
            given.set_data_from_numpy(frame[None])
            rate = triton_http.InferInput("sr", [1], "INT64")
            rate.set_data_from_numpy(np.array([silero.RATE]))
            result = client.infer(
                model,
                [given, rate],
                sequence_id=sequence,
                sequence_start=index == 0,
                sequence_end=index == len(rows) - 1,
            )
            found.append(float(result.as_numpy("output").item()))
    return found


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_speech_is_found_as_by_plain_onnxruntime(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "vad" / "1").mkdir(parents=True)
    (tmp_path / "vad" / "1" / "model.onnx").symlink_to(silero.model_file())
    (tmp_path / "vad" / "config.pbtxt").write_text(SILERO % strategy)
    recordings = silero.recordings()[:6]
    expected = [by_hand(recording) for recording in recordings]
    found: dict[int, list[float]] = {}
    with ServerProcess(tmp_path) as server:

        def run(index: int) -> None:
            found[index] = by_server(server.url, "vad", index + 1, recordings[index])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(recordings))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, probabilities in enumerate(expected):
            np.testing.assert_allclose(found[index], probabilities, atol=1e-6)
        if len(recordings) == 6:  # real speech, not the synthetic sound
            assert all(max(probabilities) > 0.8 for probabilities in expected)


# ---- a Python model -------------------------------------------------------------------------

STATES = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }, { name: "SEEN" data_type: TYPE_INT32 dims: [-1] }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  STRATEGY
  control_input [{ name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }] }]
  state [
    { input_name: "SUM_IN" output_name: "OUT" data_type: TYPE_INT32 dims: [1]
      initial_state { name: "hundred" data_type: TYPE_INT32 dims: [1] data_file: "hundred" } },
    { input_name: "SEEN_IN" output_name: "SEEN" data_type: TYPE_INT32 dims: [-1] },
    { input_name: "NAMES_IN" output_name: "NAMES" data_type: TYPE_STRING dims: [1] },
    { input_name: "COUNT_IN" output_name: "COUNT" data_type: TYPE_INT32 dims: [1]
      use_same_buffer_for_input_output: true use_growable_memory: true }
  ]
}
"""

#: OUT is the sum with what was before, SEEN all values. COUNT is never returned: the model changes its input in place.
STATEFUL = """

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = {t.name(): t.as_numpy() for t in request.inputs()}
            names = array["NAMES_IN"].flatten()[0].decode()
            array["COUNT_IN"][...] += 1
            assert names == "x" * (int(array["COUNT_IN"].item()) - 1) or not array["READY"].item(), (names, array)
            seen = np.append(array["SEEN_IN"], array["IN"], axis=1).astype(np.int32)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", array["SUM_IN"] + array["IN"]),
                pb_utils.Tensor("SEEN", seen),
                pb_utils.Tensor("NAMES", np.array([[(names + "x").encode()]], object)),
            ]))
        return responses
"""


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_states_of_a_python_model_vary_in_shape_begin_with_a_file_and_are_outputs_if_configured(
    write_model: WriteModel, strategy: str
) -> None:
    repository = write_model("stateful", STATES.replace("STRATEGY", strategy), STATEFUL)
    (repository / "stateful" / "initial_state").mkdir()
    (repository / "stateful" / "initial_state" / "hundred").write_bytes(np.array([100], np.int32).tobytes())
    with ServerProcess(repository) as server, triton_grpc.InferenceServerClient(server.grpc_url) as client:

        def send(sequence: str, value: int, outputs: list[str] | None = None, **flags: bool) -> Any:
            given = triton_grpc.InferInput("IN", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[value]], np.int32))
            wanted = None if outputs is None else [triton_grpc.InferRequestedOutput(name) for name in outputs]
            return client.infer("stateful", [given], outputs=wanted, sequence_id=sequence, **flags)

        for sequence in ("a", "b"):
            first = send(sequence, 5, sequence_start=True)
            assert first.as_numpy("OUT").tolist() == [[105]]
            assert first.as_numpy("SEEN").tolist() == [[0, 5]], "a variable dimension begins with 1, as in Triton"
            names = [output["name"] for output in first.get_response(as_json=True)["outputs"]]
            assert sorted(names) == ["OUT", "SEEN"], "a state is no output unless it is configured as one"
        only_sum = send("a", 7, ["OUT"])
        assert [output["name"] for output in only_sum.get_response(as_json=True)["outputs"]] == ["OUT"]
        last = send("a", 1, sequence_end=True)
        assert (last.as_numpy("OUT").tolist(), last.as_numpy("SEEN").tolist()) == ([[113]], [[0, 5, 7, 1]])
        again = send("a", 1, sequence_start=True, sequence_end=True)
        assert again.as_numpy("SEEN").tolist() == [[0, 1]], "START begins with the initial state"
        assert send("b", 2, sequence_end=True).as_numpy("SEEN").tolist() == [[0, 5, 2]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("dims: [1] data_file", "dims: [2] data_file"), "initial_state setting expects 8 bytes"),
        (('data_file: "hundred"', 'data_file: "other"'), "failed to open text file for read"),
    ],
)
def test_a_wrong_file_with_an_initial_state_fails_the_load(
    write_model: WriteModel, change: tuple[str, str], reason: str
) -> None:
    config = STATES.replace("STRATEGY", "direct { }").replace(*change)
    config = config.replace("dims: [1]\n      ini", "dims: [-1]\n ini")
    repository = write_model("stateful", config, STATEFUL)
    (repository / "stateful" / "initial_state").mkdir()
    (repository / "stateful" / "initial_state" / "hundred").write_bytes(np.array([100], np.int32).tobytes())
    with ServerProcess(repository, "--exit-on-error=false") as server:
        status, _ = server.get("/v2/models/stateful/ready")
        assert status != 200
        server.wait_for_log(reason)


# ---- an ONNX model that batches -------------------------------------------------------------

ACCUMULATE = """
backend: "onnxruntime"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [3] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [3] }]
instance_group [{ kind: KIND_CPU count: 1 }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  %s
  control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }]
  control_input [{ name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] }] }]
  state [{ input_name: "STATE" output_name: "NEXT" data_type: TYPE_FP32 dims: [3] }]
}
"""


def save_accumulate(path: Path) -> None:
    """OUT is IN times READY, plus STATE; at START it is 1000 more. NEXT is OUT."""
    rows: list[str | int | None] = ["rows", 3]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in ("IN", "STATE")]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows[0], 1]) for name in ("START", "READY")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in ("OUT", "NEXT")]
    nodes = [
        helper.make_node("Mul", ["IN", "READY"], ["given"]),
        helper.make_node("Mul", ["START", "thousand"], ["begin"]),
        helper.make_node("Add", ["given", "STATE"], ["sum"]),
        helper.make_node("Add", ["sum", "begin"], ["OUT"]),
        helper.make_node("Identity", ["OUT"], ["NEXT"]),
    ]
    thousand = helper.make_tensor("thousand", TensorProto.FLOAT, [1], [1000.0])
    graph = helper.make_graph(nodes, "accumulate", inputs, outputs, [thousand])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 6 }"])
@pytest.mark.parametrize("flags", [(), ("--worker-shared-memory=false",)], ids=["shared memory", "copies"])
def test_batches_of_an_onnx_model_keep_the_states_of_their_rows(
    tmp_path: Path, strategy: str, flags: tuple[str, ...]
) -> None:
    (tmp_path / "sums" / "1").mkdir(parents=True)
    save_accumulate(tmp_path / "sums" / "1" / "model.onnx")
    (tmp_path / "sums" / "config.pbtxt").write_text(ACCUMULATE % strategy)
    wrong: list[Any] = []
    with ServerProcess(tmp_path, *flags) as server:

        def run(sequence: int) -> None:
            total = np.full((1, 3), 1000, np.float32)
            with triton_grpc.InferenceServerClient(server.grpc_url) as client:
                for step in range(10):
                    values = np.array([[sequence, step, sequence * step]], np.float32)
                    total += values
                    given = triton_grpc.InferInput("IN", [1, 3], "FP32")
                    given.set_data_from_numpy(values)
                    flags = {"sequence_start": step == 0, "sequence_end": step == 9}
                    found = client.infer("sums", [given], sequence_id=sequence, **flags).as_numpy("OUT")
                    if not np.array_equal(found, total):
                        wrong.append((sequence, step, found, total))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
