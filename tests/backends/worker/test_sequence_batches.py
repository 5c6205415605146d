"""A worker with sequences: the rows of its batches, and the state that it keeps by slot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.request import OutputValue
from shm.tensor import RequestedOutput, Tensor
from tests.backends.worker.threaded_worker import LOAD, Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.worker.request import WorkerRequest

CONTROLS = [
    {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [3, 4]}]},
    {"name": "END", "control": [{"kind": "CONTROL_SEQUENCE_END", "fp32_false_true": [0.5, 1.5]}]},
    {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [True, False]}]},
    {"name": "CORRID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT32"}]},
]
STATE = [{"input_name": "LAST", "output_name": "NEXT", "data_type": "TYPE_FP32", "dims": ["-1"]}]


def load(bench: Bench, execute: Any, *, strategy: str = "direct", state: Sequence[Any] = (), **more: Any) -> None:
    bench.hello()
    sequences = {strategy: {}, "control_input": CONTROLS, "state": list(state)}
    config = {"name": "m", "backend": "scripted", "max_batch_size": 4, "sequence_batching": sequences, **more}
    bench.send(wire.Load(json.dumps(config), LOAD.model_dir, 1, "m_0", arena_byte_size=1 << 20))
    bench.next(wire.Loaded)
    assert bench.backend is not None
    bench.backend.on_execute = execute


def row(number: int, slot: int, value: float | None, flags: int = 0, **more: Any) -> wire.RequestMessage:
    """A request with one value, or padding."""
    if value is None:
        return wire.RequestMessage(number, [], sequence=wire.SequenceEntry(slot, True))
    given = Tensor("IN", "FP32", [1, 1], np.float32(value).tobytes())
    return wire.RequestMessage(number, [given], flags=flags, sequence=wire.SequenceEntry(slot), **more)


class Recorder:
    """A model that notes its rows, and responds with each input value. NEXT is the value after all before it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, requests: Sequence[WorkerRequest]) -> None:
        self.rows = [{each.name: each.as_numpy().flatten().tolist() for each in r.inputs} for r in requests]
        for request in requests:
            arrays = {each.name: each.as_numpy() for each in request.inputs}
            outputs = [OutputValue("OUT", "FP32", arrays["IN"])]
            if "LAST" in arrays:
                outputs.append(OutputValue("NEXT", "FP32", np.append(arrays["LAST"], arrays["IN"], axis=1)))
            request.respond(outputs)


def executed(bench: Bench, *rows: wire.RequestMessage) -> list[Any]:
    """Let the worker execute a batch. Returns the names of the outputs of each response, or its error code."""
    bench.send(wire.Execute(1, list(rows)))
    message = bench.next(wire.Executed)
    return [each.error_code or [output.name for output in each.outputs] for each in message.responses]


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_a_request_gets_its_control_tensors(bench: Bench, strategy: str) -> None:
    model = Recorder()
    load(bench, model, strategy=strategy)
    executed(bench, row(1, 0, 7, wire.SEQUENCE_START, correlation_id=(1 << 32) + 9))
    assert model.rows == [{"IN": [7], "START": [4], "END": [0.5], "READY": [False], "CORRID": [9]}]
    executed(bench, row(2, 0, 8, wire.SEQUENCE_END, correlation_id=9))
    assert model.rows == [{"IN": [8], "START": [3], "END": [1.5], "READY": [False], "CORRID": [9]}]
    bench.stop()


def test_a_row_without_a_request_is_padding_whose_response_is_dropped(bench: Bench) -> None:
    model = Recorder()
    load(bench, model)
    assert executed(bench, row(1, 0, None), row(2, 1, 7, correlation_id=5)) == [["OUT"]]
    padding = {"IN": [0], "START": [3], "END": [0.5], "READY": [True], "CORRID": [0]}
    assert model.rows == [padding, {"IN": [7], "START": [3], "END": [0.5], "READY": [False], "CORRID": [5]}]
    bench.stop()


def test_with_oldest_an_entry_without_a_request_is_no_row(bench: Bench) -> None:
    model = Recorder()
    load(bench, model, strategy="oldest")
    assert executed(bench, row(1, 0, None), row(2, 1, 7)) == [["OUT"]]
    assert [each["IN"] for each in model.rows] == [[7]]
    bench.stop()


def test_a_request_that_was_cancelled_is_padding_so_that_others_keep_their_rows(bench: Bench) -> None:
    model = Recorder()
    load(bench, model)
    bench.send(wire.Cancel([1]))
    assert executed(bench, row(1, 0, 6), row(2, 1, 7)) == ["cancelled", ["OUT"]]
    assert [each["IN"] for each in model.rows] == [[0], [7]]
    bench.stop()


def test_a_batch_of_padding_and_cancelled_requests_is_not_executed(bench: Bench) -> None:
    model = Recorder()
    load(bench, model)
    bench.send(wire.Cancel([2]))
    assert executed(bench, row(1, 0, None), row(2, 1, 7)) == ["cancelled"]
    assert model.rows == []
    bench.stop()


def test_state_belongs_to_a_slot_and_begins_anew_with_start(bench: Bench) -> None:
    model = Recorder()
    load(bench, model, state=STATE)
    start = wire.SEQUENCE_START
    assert executed(bench, row(1, 0, 1, start), row(2, 1, 10, start)) == [["OUT"], ["OUT"]]
    executed(bench, row(3, 0, 2), row(4, 1, 20))
    assert [each["LAST"] for each in model.rows] == [[0, 1], [0, 10]]
    executed(bench, row(5, 0, None), row(6, 1, 30))
    assert [each["LAST"] for each in model.rows] == [[0, 1, 2], [0, 10, 20]], "padding sees the state of its slot"
    executed(bench, row(7, 0, 3), row(8, 1, 40, start))
    assert [each["LAST"] for each in model.rows] == [[0, 1, 2], [0]], "padding did not change it, START does"
    bench.send(wire.EndSequence(0))
    executed(bench, row(9, 0, 4))
    assert [each["LAST"] for each in model.rows] == [[0]]
    bench.stop()


def test_a_state_output_that_is_configured_as_an_output_is_sent_if_the_client_asks_for_it(bench: Bench) -> None:
    load(bench, Recorder(), state=STATE, output=[{"name": "OUT"}, {"name": "NEXT"}])
    start = wire.SEQUENCE_START
    assert executed(bench, row(1, 0, 1, start)) == [["OUT", "NEXT"]]
    assert executed(bench, row(2, 0, 1, outputs=[RequestedOutput("OUT")])) == [["OUT"]]
    assert executed(bench, row(3, 0, 1, outputs=[RequestedOutput("NEXT")])) == [["NEXT"]]
    bench.stop()


def test_a_wrong_state_fails_the_request_and_the_state_stays(bench: Bench) -> None:
    model = Recorder()
    load(bench, model, state=[{**STATE[0], "dims": ["1"]}])
    bench.send(wire.Execute(1, [row(1, 0, 1, wire.SEQUENCE_START)]))
    [response] = bench.next(wire.Executed).responses
    assert response.error_text == (
        "state output 'NEXT' has datatype FP32 and shape [1,2], but the configuration of the state says FP32 and [-1,1]"
    )
    executed(bench, row(2, 0, 1))
    assert [each["LAST"] for each in model.rows] == [[0]]
    bench.stop()


def test_a_state_in_one_buffer_is_changed_in_place(bench: Bench) -> None:
    seen: list[list[float]] = []

    def execute(requests: Sequence[WorkerRequest]) -> None:
        for request in requests:
            found = request.input("LAST")
            assert found is not None
            array = found.as_numpy()
            seen.append(array.flatten().tolist())
            array += 1
            request.respond([OutputValue("OUT", "FP32", array)])

    state = {**STATE[0], "dims": ["2"], "use_same_buffer_for_input_output": True}
    load(bench, execute, state=[state])
    for number in (1, 2, 3):
        executed(bench, row(number, 0, 1, wire.SEQUENCE_START if number == 1 else 0))
    assert seen == [[0, 0], [1, 1], [2, 2]]
    bench.stop()


def test_a_warm_up_request_gets_what_its_sample_lacks_and_leaves_no_state(bench: Bench) -> None:
    model = Recorder()
    load(bench, model, state=STATE)
    given = [Tensor("IN", "FP32", [1, 1], bytes(4)), Tensor("START", "INT32", [1, 1], (9).to_bytes(4, "little"))]
    assert executed(bench, wire.RequestMessage(1, given)) == [["OUT"]]
    assert model.rows == [{"IN": [0], "START": [9], "END": [0.5], "READY": [False], "CORRID": [0], "LAST": [0]}]
    executed(bench, row(2, 0, 5))
    assert [each["LAST"] for each in model.rows] == [[0]]
    bench.stop()


def test_a_rescheduled_request_is_given_back_and_the_others_get_their_responses(bench: Bench) -> None:
    def execute(requests: Sequence[WorkerRequest]) -> None:
        requests[0].reschedule()
        requests[1].respond([OutputValue("OUT", "FP32", np.zeros((1, 1), np.float32))])

    load(bench, execute)
    bench.send(wire.Execute(1, [row(1, 0, 1), row(2, 1, 2)]))
    assert bench.next(wire.Rescheduled).request == 1
    assert len(bench.next(wire.Executed).responses) == 1
    bench.stop()
