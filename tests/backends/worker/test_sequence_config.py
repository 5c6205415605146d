"""Control tensors and initial states, as a configuration describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.worker.sequence_config import (
    CorrelationIdControl,
    correlation_id_control,
    flag_controls,
    sequence_inputs,
    state_outputs,
    state_tensors,
)
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path


def config(max_batch_size: int = 4, **batching: Any) -> dict[str, Any]:
    return {"name": "m", "max_batch_size": max_batch_size, "sequence_batching": batching}


def control(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "control": [fields]}


def state(**more: Any) -> dict[str, Any]:
    return {"input_name": "IN", "output_name": "OUT", "data_type": "TYPE_INT32", "dims": ["2"], **more}


@pytest.mark.parametrize(
    ("values", "datatype", "true"),
    [
        ({"int32_false_true": [-1, 7]}, "INT32", np.int32(7)),
        ({"fp32_false_true": [0.5, 1.5]}, "FP32", np.float32(1.5)),
        ({"bool_false_true": [True, False]}, "BOOL", np.bool_(False)),
    ],
)
def test_a_flag_has_a_value_for_false_and_one_for_true(values: Any, datatype: str, true: Any) -> None:
    [found] = flag_controls(config(control_input=[control("C", kind="CONTROL_SEQUENCE_END", **values)]))
    assert (found.name, found.kind, found.datatype) == ("C", "CONTROL_SEQUENCE_END", datatype)
    assert found.values[1] == true.tobytes()


def test_start_is_the_kind_that_json_leaves_out() -> None:
    [found] = flag_controls(config(control_input=[control("C", int32_false_true=[0, 1])]))
    assert found.kind == "CONTROL_SEQUENCE_START"


@pytest.mark.parametrize(
    ("datatype", "correlation_id", "data"),
    [
        ("UINT64", (1 << 64) - 1, b"\xff" * 8),
        ("INT64", 5, np.int64(5).tobytes()),
        ("UINT32", (1 << 32) + 5, np.uint32(5).tobytes()),
        ("INT32", (1 << 40) + 7, np.int32(7).tobytes()),
        ("BYTES", "ä", b"\x02\0\0\0\xc3\xa4"),
        ("BYTES", "", b"\0\0\0\0"),
        ("BYTES", 5, b"\x01\0\0\0005"),
        ("UINT64", "", b"\0" * 8),
        # The digest is the same in each process: an instance that is started again knows the number.
        ("UINT64", "seq-a", np.uint64(7469151566616978284).tobytes()),
        ("INT32", "seq-a", np.uint32(3452035948).tobytes()),
    ],
)
def test_a_correlation_id_has_the_type_of_its_control(datatype: str, correlation_id: int | str, data: bytes) -> None:
    assert CorrelationIdControl("C", datatype).value(correlation_id) == data


def test_inputs_and_outputs_that_the_model_has_because_of_sequences() -> None:
    controls = [
        control("S", kind="CONTROL_SEQUENCE_START", int32_false_true=[0, 1]),
        control("C", kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_STRING"),
    ]
    given = config(control_input=controls, state=[state()])
    assert [(spec.name, spec.datatype, spec.dims, spec.batched) for spec in sequence_inputs(given)] == [
        ("S", "INT32", (1,), True),
        ("C", "BYTES", (1,), True),
        ("IN", "INT32", (2,), True),
    ]
    assert [(spec.name, spec.dims) for spec in state_outputs(given)] == [("OUT", (2,))]
    assert correlation_id_control(given) == CorrelationIdControl("C", "BYTES")
    assert sequence_inputs({"name": "m"}) == state_outputs({"name": "m"}) == []


def initial(tmp_path: Path, max_batch_size: int = 4, **fields: Any) -> tuple[tuple[int, ...], bytes]:
    [found] = state_tensors(config(max_batch_size, state=[state(**fields)]), tmp_path)
    return found.initial_shape, found.initial_data


def test_a_state_begins_with_zeros_or_with_a_file(tmp_path: Path) -> None:
    assert initial(tmp_path) == ((1, 2), bytes(8))
    assert initial(tmp_path, 0) == ((2,), bytes(8))
    assert initial(tmp_path, dims=["-1", "2"]) == ((1, 1, 2), bytes(8))
    zero = {"data_type": "TYPE_INT32", "dims": ["3", "2"], "zero_data": True}
    assert initial(tmp_path, dims=["-1", "2"], initial_state=[zero]) == ((1, 3, 2), bytes(24))
    assert initial(tmp_path, data_type="TYPE_STRING") == ((1, 2), bytes(8)), "two empty strings"
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "file").write_bytes(b"12345678")
    given = {"data_type": "TYPE_INT32", "dims": ["2"], "data_file": "file"}
    assert initial(tmp_path, initial_state=[given]) == ((1, 2), b"12345678")


def test_files_of_another_size_or_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(b"1234")
    (tmp_path / "secret").write_bytes(b"12345678")
    (tmp_path / "initial_state" / "link").symlink_to(tmp_path / "secret")
    given = {"data_type": "TYPE_INT32", "dims": ["2"]}
    with pytest.raises(InvalidArgument) as short:
        initial(tmp_path, initial_state=[{**given, "data_file": "short"}])
    assert short.value.message == (
        "initial_state setting expects 8 bytes, but the data provided from shortonly has 4 bytes"
    )
    with pytest.raises(InvalidArgument, match="is outside"):
        initial(tmp_path, initial_state=[{**given, "data_file": "link"}])
    with pytest.raises(InternalError, match="failed to open text file for read"):
        initial(tmp_path, initial_state=[{**given, "data_file": "missing"}])
