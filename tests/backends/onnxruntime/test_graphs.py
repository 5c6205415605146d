"""CUDA graphs of ONNX models, on fakes: a graph computes with the addresses that it was captured with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.errors import InternalError, InvalidArgument
from tests.backends.add_sub_batch import check_rows_of_a_batch, floats
from tests.backends.onnxruntime.sessions_on_device import CONFIG, CUDA, TENSORS, lab, loaded, models, ort
from tests.fake_cuda import memory

if TYPE_CHECKING:
    from backends.onnxruntime.backend import OnnxRuntimeBackend
    from tests.backends.device_lab import DeviceLab
    from tests.backends.onnxruntime.conftest import OnnxModels
    from tests.fake_onnxruntime import FakeOnnxRuntime

__all__ = ["lab", "models", "ort"]

ASKED = {"execution_accelerators": {"gpu_execution_accelerator": [
    {"name": "cuda", "parameters": {"enable_cuda_graph": "1"}}]}}  # fmt: skip


def infer(lab: DeviceLab, backend: OnnxRuntimeBackend, *sizes: int) -> None:
    """Execute a batch of requests with these numbers of rows, and check the outputs."""
    requests = [lab.request({"A": floats(size, 4) + size, "B": floats(size, 4)}) for size in sizes]
    backend.execute(requests, lab.timings)
    for size, request in zip(sizes, requests, strict=True):
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4) + size)
        assert np.array_equal(lab.outputs(request)["Y"], np.full((size, 4), size, np.float32))


def warnings(lab: DeviceLab) -> list[str]:
    return [text for level, text in lab.logged if level == "WARNING"]


def test_batches_of_captured_sizes_are_launched_as_graphs(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models, dynamic_batching={"preferred_batch_size": [4]}, optimization=ASKED)
    session = ort.sessions[0]
    assert session.options[CUDA]["enable_cuda_graph"] == "1"
    assert sorted(session.graphs) == ["1", "2", "3"]  # of 8, 4 and 1 rows
    session.launched.clear()
    for sizes in ((1,), (2,), (1, 3), (8,), (4,), (5,), (1,)):
        infer(lab, backend, *sizes)
    assert session.launched == ["3", "2", "1", "2", "3"]
    assert warnings(lab) == []


def test_each_request_of_a_batch_gets_its_rows_from_a_graph(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    cuda = {"graphs": True, "graph_spec": [{"batch_size": 3}]}
    backend = loaded(lab, models, optimization={"cuda": cuda})
    ort.sessions[0].launched.clear()
    check_rows_of_a_batch(lab, backend)
    assert ort.sessions[0].launched == ["1"]


def test_smaller_batches_use_a_graph_down_to_its_lower_bound(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    cuda = {"graphs": True, "graph_spec": [{"batch_size": 8, "graph_lower_bound": {"batch_size": 5}}]}
    backend = loaded(lab, models, optimization={"cuda": cuda})
    ort.sessions[0].launched.clear()
    for sizes in ((8,), (2, 3), (4,), (7,)):
        infer(lab, backend, *sizes)
    assert ort.sessions[0].launched == ["1"] * 3


def test_tensors_of_clients_on_the_gpu_are_copied_there_and_not_over_the_host(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models, optimization=ASKED)
    ort.sessions[0].launched.clear()
    before = lab.instance_device.copies
    request = lab.request({})
    request.inputs.extend([lab.device_input("A", floats(2, 4)), lab.device_input("B", floats(2, 4))])  # type: ignore[list-item]
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["X"], 2 * floats(2, 4))
    assert lab.instance_device.copies - before == 2  # those of the lab, which reads the outputs
    assert len(ort.sessions[0].launched) == 1


def test_a_model_that_cannot_have_graphs_fails_where_they_are_asked_for_and_runs_without_otherwise(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    ort.refuses_graphs = True
    with pytest.raises(InternalError, match="cannot use the graph capture feature as requested"):
        loaded(lab, models, optimization=ASKED)
    backend = loaded(lab, models, optimization={"cuda": {"graphs": True}})
    infer(lab, backend, 2)
    (line,) = warnings(lab)
    assert line.startswith("model 'model' runs without CUDA graphs: onnx runtime error 1: This session cannot use")
    assert "enable_cuda_graph" not in ort.sessions[-1].options[CUDA]


def test_graphs_that_cannot_be_captured_are_left_out_with_a_warning(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    value = ("A", 1, ["N", "M"])
    models.write([("Identity", ["A"], ["X"])], [value], [("X", 1, ["N", "M"])])
    tensors = [{**TENSORS[0], "dims": [-1]}], [{**TENSORS[2], "dims": [-1]}]
    backend = loaded(lab, models, input=tensors[0], output=tensors[1], optimization={"cuda": {
        "graphs": True, "graph_spec": [{"batch_size": 2}, {"batch_size": 2, "input": {"A": {"dim": ["3"]}},
                                                           "graph_lower_bound": {"batch_size": 2, "input": {
                                                               "A": {"dim": ["3"]}}}}]}})  # fmt: skip
    (line,) = warnings(lab)
    assert line == (
        "model 'model': unable to record CUDA graph for model_0, batch size 2: the graph specification has no "
        "dimensions for input 'A', which has variable dimensions"
    )
    ort.sessions[0].launched.clear()
    for shape in ((2, 3), (2, 5), (1, 3)):
        request = lab.request({"A": floats(*shape)})
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], floats(*shape))
    assert ort.sessions[0].launched == ["1"]


def test_a_session_that_fails_while_it_captures_runs_without_that_graph(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    models.write([("Add", ["A", "B"], ["X"])], [("A", 1, ["N", 4]), ("B", 1, [3, 4])], [("X", 1, [3, 4])])
    config = {"max_batch_size": 0, "input": [{**TENSORS[0], "dims": [-1, 4]}, {**TENSORS[1], "dims": [3, 4]}],
              "output": [{**TENSORS[2], "dims": [3, 4]}]}  # fmt: skip
    specs = [{"input": {"A": {"dim": [str(rows), "4"]}}} for rows in (2, 3)]
    backend = loaded(lab, models, **config, optimization={"cuda": {"graphs": True, "graph_spec": specs}})
    (line,) = warnings(lab)
    assert line.startswith(
        "model 'model': unable to record CUDA graph for model_0, shapes {'A': (2, 4), 'B': (3, 4)}: "
    )
    ort.sessions[0].launched.clear()
    request = lab.request({"A": floats(3, 4), "B": floats(3, 4)})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["X"], 2 * floats(3, 4))
    assert ort.sessions[0].launched == ["1"]


def test_models_with_strings_have_no_graphs(lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime) -> None:
    models.write_unary("Identity", 8, ["N"], ["N"])
    string = {"data_type": "TYPE_STRING", "dims": [-1]}
    config = {"max_batch_size": 0, "input": [{"name": "A", **string}], "output": [{"name": "X", **string}]}
    loaded(lab, models, **config, optimization=ASKED)
    assert warnings(lab) == ["model 'model' runs without CUDA graphs: tensor 'A' has strings, which are on the host"]
    assert "enable_cuda_graph" not in ort.sessions[0].options[CUDA]


def test_a_wrong_specification_fails_the_load(lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime) -> None:
    with pytest.raises(InvalidArgument, match="graph spec expects 'batch_size' to be >= 1 and <= 8"):
        loaded(lab, models, optimization={**ASKED, "cuda": {"graph_spec": [{"batch_size": 9}]}})


def test_a_finalized_backend_has_given_its_memory_back(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models, optimization=ASKED)
    assert CONFIG["max_batch_size"] == 8
    held = set(memory.own)
    ort.sessions.clear()
    backend.finalize()
    assert held - set(memory.own), "the blocks of the graphs"
