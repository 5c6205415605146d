from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.transport import wire
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from tests.backends.add_sub_batch import check_rows_of_a_batch, floats
from tests.backends.tensorrt.plans import add_sub_plan, tensor
from tests.fake_cuda import runtime
from tests.fake_tensorrt.plan import PlanFile

if TYPE_CHECKING:
    from tests.backends.conftest import Lab
    from tests.backends.tensorrt.conftest import Plans


def warnings(lab: Lab) -> list[str]:
    return [text for level, text in lab.logged if level == "WARNING"]


# ---- completing -----------------------------------------------------------------------------


def test_a_configuration_is_completed_from_the_engine(plans: Plans) -> None:
    plans.write(add_sub_plan())
    filled = plans.completed()
    assert filled["max_batch_size"] == 8
    assert filled["dynamic_batching"] == {}
    assert filled["input"][0] == {"name": "A", "data_type": "TYPE_FP32", "dims": [4]}
    assert [entry["name"] for entry in filled["output"]] == ["X", "Y"]


def test_a_model_without_a_gpu_is_not_completed_and_fails_its_load(plans: Plans, lab: Lab) -> None:
    from backends.tensorrt.backend import TensorRtBackend

    config = {"instance_group": [{"name": "model", "kind": "KIND_CPU"}]}
    assert "input" not in plans.completed(config)  # nor is there a plan
    with pytest.raises(InvalidArgument) as caught:
        TensorRtBackend(plans.host).load(plans.arguments(config, instance_name="model_0", kind="CPU"))
    assert caught.value.message == "unable to load model 'model', TensorRT backend supports only GPU device"


# ---- plans that cannot be loaded ------------------------------------------------------------


def test_a_missing_plan_fails_the_load(plans: Plans) -> None:
    with pytest.raises(Unavailable, match=r"^unable to find '.*/model/1/model.plan' for model instance 'model'$"):
        plans.completed()


@pytest.mark.parametrize(
    ("plan", "settings", "said"),
    [
        (
            {"version": "10.3.0.26"},
            {},
            "expecting library version 11.4.0.106 got 10.3.0.26.*The plan is of another ver",
        ),
        ({"capability": "8.6"}, {}, "expecting compute 9.0 got compute 8.6.*this one, of compute capability 9.0"),
        ({"version_compatible": True}, {}, "contains host code.*--backend-config=tensorrt,version-compatible=true"),
    ],
)
def test_a_plan_of_another_version_or_device_is_refused_with_what_to_do(
    plans: Plans, plan: dict[str, Any], settings: dict[str, str], said: str
) -> None:
    plans.write(add_sub_plan(**plan))
    with pytest.raises(InternalError, match=r"^unable to load plan file to auto complete config: .*model\.plan: unable"
                       r" to create TensorRT engine: .*" + said):  # fmt: skip
        plans.completed(backend_config=settings)


def test_a_file_that_is_no_plan_is_refused(plans: Plans) -> None:
    plans.file.write_bytes(b"ONNX")
    with pytest.raises(InternalError, match="Magic tag does not match.*The file is no plan of TensorRT"):
        plans.completed()


def test_a_version_compatible_plan_is_loaded_if_that_is_allowed(plans: Plans) -> None:
    plans.write(add_sub_plan(version="10.3.0.26", version_compatible=True))
    assert plans.completed(backend_config={"version-compatible": "true"})["max_batch_size"] == 8


def test_the_plan_for_the_capability_of_the_device_is_loaded(plans: Plans) -> None:
    plans.write(add_sub_plan(most=2), "hopper.plan")
    plans.write(add_sub_plan(most=5, capability="8.6"))
    assert plans.completed({"cc_model_filenames": {"9.0": "hopper.plan"}})["max_batch_size"] == 2


def test_a_server_without_tensorrt_says_what_to_install(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    plans.write(add_sub_plan())
    monkeypatch.setenv("NAIAD_TENSORRT", "tests.no_such_module")
    with pytest.raises(Unavailable, match=r"^TensorRT is not installed: pip install '\.\[tensorrt\]'"):
        plans.completed()


# ---- executing ------------------------------------------------------------------------------


def test_each_request_of_a_batch_gets_its_rows(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan())
    backend = plans.loaded()
    check_rows_of_a_batch(lab, backend)


def test_a_batch_is_waited_for_once(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan())
    backend = plans.loaded()
    stream = runtime.cudaStream_t(plans.host.device.stream)
    for size in (3, 2, 3):
        request = lab.request({"A": floats(size, 4), "B": floats(size, 4)})
        before = stream.waits
        backend.execute([request], lab.timings)
        assert stream.waits == before, "the worker waits"
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4))
        assert stream.waits == before + 1


def test_only_the_request_whose_shape_no_profile_supports_fails(lab: Lab, plans: Plans) -> None:
    extent = [[2, 4], [4, 4], [8, 4]]
    plans.write(add_sub_plan(profiles=[{"A": extent, "B": extent}]))
    backend = plans.loaded()
    request = lab.request({"A": floats(1, 4), "B": floats(1, 4)})
    with pytest.raises(InvalidArgument) as caught:
        backend.execute([request], lab.timings)
    assert caught.value.message == (
        "request specifies invalid shape for input 'A' for model_0. Error details: model expected the shape of "
        "dimension 0 to be between 2 and 8 but received 1"
    )
    pair = [lab.request({"A": floats(1, 4), "B": floats(1, 4)}) for _ in range(2)]
    backend.execute(pair, lab.timings)  # two rows are a batch of the profile
    assert np.array_equal(lab.outputs(pair[1])["X"], 2 * floats(1, 4))


def test_the_profile_with_the_nearest_optimum_executes_a_batch(lab: Lab, plans: Plans) -> None:
    small, large = [[1, 4], [1, 4], [4, 4]], [[3, 4], [16, 4], [16, 4]]
    plans.write(add_sub_plan(profiles=[{"A": small, "B": small}, {"A": large, "B": large}]))
    group = {"name": "model", "kind": "KIND_GPU", "gpus": [0], "profile": ["0", "1"]}
    backend = plans.loaded({"instance_group": [group]})
    for size in (1, 4, 3, 16, 10):
        request = lab.request({"A": floats(size, 4), "B": floats(size, 4)})
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4))


def test_an_unknown_profile_fails_the_load(plans: Plans) -> None:
    plans.write(add_sub_plan())
    group = {"name": "model", "kind": "KIND_GPU", "gpus": [0], "profile": ["3"]}
    with pytest.raises(InternalError, match=r"invalid profile 3 \. Number of profiles supported by TensorRT engine: 1"):
        plans.loaded({"instance_group": [group]})


def test_outputs_whose_shape_depends_on_values_have_the_shape_of_this_batch(lab: Lab, plans: Plans) -> None:
    tensors = [tensor("A", [4]), tensor("I", [1, -1], "INT64", output=True)]
    plans.write(PlanFile(tensors, {"I": ["nonzero", "A"]}))
    backend = plans.loaded()
    for values in ([0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 5, 0]):
        request = lab.request({"A": np.array(values, np.float32)})
        backend.execute([request], lab.timings)
        assert lab.outputs(request)["I"].tolist() == [[index for index, value in enumerate(values) if value]]


@pytest.mark.parametrize("priority", ["PRIORITY_DEFAULT", "PRIORITY_MAX"])
def test_shape_tensors_are_read_and_written_on_the_host(lab: Lab, plans: Plans, priority: str) -> None:
    tensors = [
        tensor("S", [2], "INT32", is_shape_tensor=True, on_host=True),
        tensor("X", [-1, -1], output=True),
        tensor("N", [1], "INT64", output=True, is_shape_tensor=True, on_host=True),
    ]
    values = [{"S": [[1, 1], [2, 2], [4, 4]]}]
    plans.write(PlanFile(tensors, {"X": ["fill", "S"], "N": ["rows", "S"]}, values=values))
    backend = plans.loaded({"optimization": {"priority": priority}})
    for shape in ([2, 3], [4, 1], [2, 3]):
        request = lab.request({"S": np.array(shape, np.int32)})
        backend.execute([request], lab.timings)
        assert lab.outputs(request)["X"].tolist() == np.ones(shape).tolist()
        assert lab.outputs(request)["N"].tolist() == [2]
    request = lab.request({"S": np.array([2, 5], np.int32)})
    with pytest.raises(InvalidArgument, match="shape value at index 1 is expected to be in range from 1 to 4, Got: 5"):
        backend.execute([request], lab.timings)


def test_a_shape_tensor_may_have_any_number_of_values(lab: Lab, plans: Plans) -> None:
    tensors = [
        tensor("S", [-1], "INT32", is_shape_tensor=True, on_host=True),
        tensor("N", [1], "INT64", output=True, is_shape_tensor=True, on_host=True),
    ]
    plans.write(PlanFile(tensors, {"N": ["rows", "S"]}, [{"S": [[1], [2], [4]]}]))
    backend = plans.loaded()
    for count in (3, 1, 4):
        request = lab.request({"S": np.ones(count, np.int32)})
        backend.execute([request], lab.timings)
        assert lab.outputs(request)["N"].tolist() == [count]


def test_a_model_that_does_not_batch_executes_requests_of_any_shape_of_its_profile(lab: Lab, plans: Plans) -> None:
    tensors = [tensor("A", [2, -1]), tensor("X", [2, -1], output=True)]
    plans.write(PlanFile(tensors, {"X": ["identity", "A"]}, [{"A": [[2, 1], [2, 4], [2, 9]]}]))
    backend = plans.loaded()
    for width in (1, 9, 4):
        request = lab.request({"A": floats(2, width)})
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], floats(2, width))


def test_a_batch_of_one_number_for_each_row_is_reshaped(lab: Lab, plans: Plans) -> None:
    tensors = [tensor("A", [-1, 4]), tensor("X", [-1], output=True)]
    plans.write(PlanFile(tensors, {"X": ["total", "A"]}, [{"A": [[1, 4], [2, 4], [4, 4]]}]))
    backend = plans.loaded()
    requests = [lab.request({"A": floats(size, 4)}) for size in (1, 2)]
    backend.execute(requests, lab.timings)
    assert [lab.outputs(request)["X"].tolist() for request in requests] == [[[6]], [[6], [22]]]


@pytest.mark.parametrize("priority", ["PRIORITY_MAX", "PRIORITY_MIN"])
def test_a_model_with_a_priority_executes_on_a_stream_of_its_own(lab: Lab, plans: Plans, priority: str) -> None:
    plans.write(add_sub_plan())
    backend = plans.loaded({"optimization": {"priority": priority, "cuda": {"graphs": True}}})
    for size in (2, 5, 7):  # without and with a graph
        request = lab.request({"A": floats(size, 4), "B": floats(size, 4)})
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4))


def test_fp8_inputs_fail_the_load_with_what_to_do(plans: Plans) -> None:
    plans.write(PlanFile([tensor("A", [4], "FP8"), tensor("X", [4], output=True)], {"X": ["identity", "A"]}))
    with pytest.raises(Unsupported, match="input 'A' of the engine has the TensorRT type FP8, which the inference"):
        plans.completed()


def test_the_memory_of_an_instance_is_reported(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan(width=4096))
    lab.collector.joined()
    plans.loaded()
    (report,) = lab.reported
    assert isinstance(report, wire.MemoryUsed)
    (use,) = report.uses
    assert (use.kind, use.device_id) == ("GPU", 0)
    assert use.byte_size >= 2 * 8 * 4096 * 4  # two outputs of eight rows


def test_a_finalized_backend_has_given_its_memory_back(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan(width=4096))
    backend = plans.loaded({"optimization": {"cuda": {"graphs": True}}})
    request = lab.request({"A": floats(2, 4096), "B": floats(2, 4096)})
    backend.execute([request], lab.timings)
    before = plans.host.device.cuda.free_and_total(0)[0]
    backend.finalize()
    assert plans.host.device.cuda.free_and_total(0)[0] > before + 2 * 8 * 4096 * 4


# ---- CUDA graphs ----------------------------------------------------------------------------


def test_batches_of_captured_sizes_are_launched_as_graphs(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan())
    config = {"dynamic_batching": {"preferred_batch_size": [4]}, "optimization": {"cuda": {"graphs": True}}}
    backend = plans.loaded(config)
    launched = []
    for size in (1, 2, 4, 8):
        request = lab.request({"A": floats(size, 4), "B": floats(size, 4)})
        before = len(runtime.launches)
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4))
        launched.append(len(runtime.launches) - before)
    assert launched == [1, 0, 1, 1]
    assert warnings(lab) == []


def test_a_lower_bound_lets_smaller_batches_use_a_graph(lab: Lab, plans: Plans) -> None:
    plans.write(add_sub_plan())
    spec = {"batch_size": 8, "graph_lower_bound": {"batch_size": 5}}
    backend = plans.loaded({"optimization": {"cuda": {"graphs": True, "graph_spec": [spec]}}})
    for size, count in ((8, 1), (5, 1), (4, 0), (6, 1)):
        before = len(runtime.launches)
        requests = [lab.request({"A": floats(rows, 4), "B": floats(rows, 4)}) for rows in (1, size - 1)]
        backend.execute(requests, lab.timings)
        assert len(runtime.launches) - before == count
        for rows, request in zip((1, size - 1), requests, strict=True):
            assert np.array_equal(lab.outputs(request)["X"], 2 * floats(rows, 4))


def test_models_whose_shapes_depend_on_values_have_no_graphs(lab: Lab, plans: Plans) -> None:
    tensors = [tensor("A", [4]), tensor("I", [1, -1], "INT64", output=True)]
    plans.write(PlanFile(tensors, {"I": ["nonzero", "A"]}))
    backend = plans.loaded({"optimization": {"cuda": {"graphs": True}}})
    assert "unable to record CUDA graph for model_0" in warnings(lab)[0]
    request = lab.request({"A": np.ones(4, np.float32)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["I"].tolist() == [[0, 1, 2, 3]]
