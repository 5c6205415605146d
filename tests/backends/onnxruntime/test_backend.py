from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from backends.base import ModelArguments
from backends.onnxruntime.backend import OnnxRuntimeBackend
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from shm.arena import INLINE_LIMIT
from tests.backends.add_sub_batch import check_rows_of_a_batch, floats

if TYPE_CHECKING:
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array
    from tests.backends.conftest import Lab
    from tests.backends.onnxruntime.conftest import OnnxModels, Value

DEMO = Path(__file__).parents[3] / "kernel" / "demo"
FLOAT = TensorProto.FLOAT


def write_add_sub(models: OnnxModels, width: int = 4) -> None:
    values: dict[str, Value] = {name: (name, FLOAT, ["N", width]) for name in "ABXY"}
    models.write(
        [("Add", ["A", "B"], ["X"]), ("Sub", ["A", "B"], ["Y"])],
        [values["A"], values["B"]],
        [values["X"], values["Y"]],
    )


# ---- configuration --------------------------------------------------------------------------


def test_a_configuration_is_completed_from_the_file_with_a_warning(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    config = models.completed()
    assert config["max_batch_size"] == 4
    assert [entry["name"] for entry in config["input"]] == ["A", "B"]
    ((level, text),) = lab.logged
    assert level == "WARNING"
    assert text.startswith("autofilled max_batch_size to 4 for model 'model' since batching is supporrted")
    assert text.endswith("In config.pbtxt this is: max_batch_size: 4")


def test_a_configuration_with_inputs_and_outputs_is_not_completed(lab: Lab, models: OnnxModels) -> None:
    config = {"name": "model", "input": [{"name": "A"}], "output": [{"name": "X"}]}
    assert models.completed(config) == config  # the model file does not exist
    assert lab.logged[0][1].startswith("skipping model configuration auto-complete for 'model'")


# ---- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../weights.bin", "sub/../../weights.bin", "ABSOLUTE"])
def test_weights_outside_of_the_folder_are_not_read(models: OnnxModels, place: str) -> None:
    outside = models.dir / "weights.bin"
    outside.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    values: dict[str, Value] = {name: (name, FLOAT, ["N", 4]) for name in "AX"}
    models.write([("Add", ["A", "W"], ["X"])], [values["A"]], [values["X"]], {"W": np.zeros(4, np.float32)})
    model = onnx.load(models.file)
    [weights] = model.graph.initializer
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    place = str(outside) if place == "ABSOLUTE" else place
    for key, value in (("location", place), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    models.file.write_bytes(model.SerializeToString())
    with pytest.raises(InternalError, match="(?i)external|outside|escapes|path"):
        models.loaded()


def test_a_missing_file_fails_the_load(models: OnnxModels) -> None:
    with pytest.raises(Unavailable) as caught:
        models.completed()
    assert caught.value.message == f"unable to find '{models.file}' for model instance 'model'"


def test_a_file_that_is_not_a_model_fails_the_load_with_a_reason(models: OnnxModels) -> None:
    models.file.write_bytes(b"not a model")
    with pytest.raises(InternalError, match=r"^onnx runtime error 7: Load model from .* failed:Protobuf parsing"):
        models.completed()


def test_an_unknown_operator_fails_the_load(models: OnnxModels) -> None:
    models.write_unary("Teleport", FLOAT, [1], [1])
    with pytest.raises(InternalError, match=r"^onnx runtime error 10: .*No Op registered for Teleport"):
        models.completed()


def test_a_contradiction_between_configuration_and_file_fails_the_load(models: OnnxModels) -> None:
    write_add_sub(models)
    config = {**models.completed(), "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [4]}]}
    with pytest.raises(InvalidArgument, match="configuration expects 1 inputs, model provides 2"):
        models.loaded(config)


def test_files_are_verified_without_loading_the_model(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    backend = OnnxRuntimeBackend(lab)
    backend.verify(models.arguments(models.completed()))
    config = {**models.completed(), "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [4]}]}
    with pytest.raises(InvalidArgument, match="configuration expects 1 inputs, model provides 2"):
        backend.verify(models.arguments(config))
    models.file.write_bytes(b"cut")
    with pytest.raises(InternalError, match="Protobuf parsing"):
        backend.verify(models.arguments(config))


def test_a_gpu_instance_is_refused_without_a_gpu(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    backend = OnnxRuntimeBackend(lab)
    with pytest.raises(Unsupported, match="instance 'model_0' of kind KIND_GPU needs an onnxruntime"):
        backend.load(models.arguments(models.completed(), instance_name="model_0", kind="GPU"))


def test_a_warning_says_that_sharing_a_session_has_no_effect(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    models.loaded({"parameters": {"share_session_between_instances": {"string_value": "true"}}})
    assert "'share_session_between_instances' of model 'model' has no effect" in lab.logged[-1][1]


# ---- executing ------------------------------------------------------------------------------


def test_each_request_of_a_batch_gets_its_rows(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    backend = models.loaded()
    check_rows_of_a_batch(lab, backend)


@pytest.mark.parametrize("volatile", [True, False])
def test_outputs_of_a_single_request_are_written_to_their_destinations(
    lab: Lab, models: OnnxModels, volatile: bool
) -> None:
    lab.reserves = True
    width = INLINE_LIMIT // 4 + 1  # a smaller output has no destination: it is sent in a message
    write_add_sub(models, width)
    backend = models.loaded()
    for size in (1, 3):
        request = lab.request({"A": floats(size, width), "B": floats(size, width)}, volatile=volatile)
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, width))
    assert lab.in_place == ["X", "Y"] * 2


def test_outputs_with_and_without_destination_can_be_combined(lab: Lab, models: OnnxModels) -> None:
    lab.reserves = True
    models.write(
        [("Neg", ["A"], ["X"]), ("NonZero", ["A"], ["I"])],
        [("A", FLOAT, [4])],
        [("X", FLOAT, [4]), ("I", TensorProto.INT64, [1, None])],
    )
    backend = models.loaded()
    request = lab.request({"A": floats(4)})
    backend.execute([request], lab.timings)
    assert lab.in_place == ["X"]
    assert lab.outputs(request)["X"].tolist() == [0, -1, -2, -3]
    assert lab.outputs(request)["I"].tolist() == [[1, 2, 3]]


def test_a_model_with_wrong_declared_output_shapes_still_works(lab: Lab, models: OnnxModels) -> None:
    lab.reserves = True
    models.write_unary("LeakyRelu", FLOAT, ["N"], [3])
    backend = models.loaded()
    for size in (2, 3):
        request = lab.request({"A": floats(size)})
        backend.execute([request], lab.timings)
        assert lab.outputs(request)["X"].tolist() == floats(size).tolist()
    assert lab.in_place == []


def test_a_failed_run_has_onnx_runtimes_reason(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Gather", ["T", "A"], ["X"])],
        [("A", TensorProto.INT64, [1])],
        [("X", FLOAT, [1])],
        {"T": floats(3)},
    )
    for lab.reserves in (False, True):
        backend = models.loaded()
        with pytest.raises(InternalError, match=r"^onnx runtime error \d: .*indices element out of data bounds"):
            backend.execute([lab.request({"A": np.array([7], np.int64)})], lab.timings)


def test_only_the_request_with_wrong_inputs_fails_in_a_batch(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Gather", ["T", "A"], ["X"])],
        [("A", TensorProto.INT64, ["N", 1])],
        [("X", FLOAT, ["N", 1])],
        {"T": floats(3)},
    )
    backend = models.loaded()
    good, bad = (lab.request({"A": np.array([[index]], np.int64)}) for index in (2, 7))
    backend.execute([good, bad], lab.timings)
    assert lab.outputs(good)["X"].tolist() == [[2]]
    assert "indices element out of data bounds" in lab.error(bad).message


def run_prepared(backend: OnnxRuntimeBackend, lab: Lab, requests: list[WorkerRequest]) -> None:
    """Execute a batch as a worker that pipelines: it is computed in another thread."""
    batch = backend.prepare(requests, lab.timings)
    assert batch is not None
    with ThreadPoolExecutor(1) as thread:
        thread.submit(batch.run).result()
    assert not any(request.finished for request in requests), "responses are made in the main thread"
    batch.respond()


def test_batches_that_are_prepared_meanwhile_give_the_same_rows(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    backend = models.loaded()
    assert backend.pipelines
    batches = [[lab.request({"A": floats(size, 4) + n, "B": floats(size, 4)}) for size in (1, 2)] for n in range(2)]
    prepared = [backend.prepare(batch, lab.timings) for batch in batches]
    for number, batch in enumerate(prepared):
        assert batch is not None
        batch.run()
        batch.respond()
        for request, size in zip(batches[number], (1, 2), strict=True):
            assert np.array_equal(lab.outputs(request)["X"], 2 * floats(size, 4) + number)
            assert np.array_equal(lab.outputs(request)["Y"], np.full((size, 4), number))


@pytest.mark.parametrize("reserves", [False, True])
def test_a_prepared_request_alone_may_have_a_destination(lab: Lab, models: OnnxModels, reserves: bool) -> None:
    write_add_sub(models)
    lab.reserves = reserves
    request = lab.request({"A": floats(1, 4), "B": floats(1, 4)})
    run_prepared(models.loaded(), lab, [request])
    assert lab.outputs(request)["X"].tolist() == [[0, 2, 4, 6]]
    assert lab.in_place == (["X", "Y"] if reserves else [])


def test_only_the_request_with_wrong_inputs_fails_in_a_prepared_batch(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Gather", ["T", "A"], ["X"])],
        [("A", TensorProto.INT64, ["N", 1])],
        [("X", FLOAT, ["N", 1])],
        {"T": floats(3)},
    )
    backend = models.loaded()
    good, bad = (lab.request({"A": np.array([[index]], np.int64)}) for index in (2, 7))
    run_prepared(backend, lab, [good, bad])
    assert lab.outputs(good)["X"].tolist() == [[2]]
    assert "indices element out of data bounds" in lab.error(bad).message
    alone = lab.request({"A": np.array([[7]], np.int64)})
    with pytest.raises(InternalError, match="indices element out of data bounds"):
        run_prepared(backend, lab, [alone])


def test_what_cannot_be_gathered_is_left_to_execute(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models)
    requests = [lab.request({"A": floats(1, width), "B": floats(1, width)}) for width in (4, 3)]
    assert models.loaded().prepare(requests, lab.timings) is None


@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize(
    ("element", "array"),
    [
        (TensorProto.BOOL, np.array([True, False])),
        (TensorProto.UINT8, np.array([0, 255], np.uint8)),
        (TensorProto.UINT16, np.array([0, 65535], np.uint16)),
        (TensorProto.UINT32, np.array([0, 2**32 - 1], np.uint32)),
        (TensorProto.UINT64, np.array([0, 2**64 - 1], np.uint64)),
        (TensorProto.INT8, np.array([-128, 127], np.int8)),
        (TensorProto.INT16, np.array([-(2**15), 2**15 - 1], np.int16)),
        (TensorProto.INT32, np.array([-(2**31), 2**31 - 1], np.int32)),
        (TensorProto.INT64, np.array([-(2**63), 2**63 - 1], np.int64)),
        (TensorProto.FLOAT16, np.array([0.5, -1], np.float16)),
        (TensorProto.FLOAT, np.array([0.5, -1], np.float32)),
        (TensorProto.DOUBLE, np.array([0.5, -1], np.float64)),
        (TensorProto.STRING, np.array([b"a\x00b", "ä".encode()], object)),
        (TensorProto.BFLOAT16, np.array([0x3F80, 0x4000], np.uint16)),
    ],
)
def test_every_datatype_is_supported(lab: Lab, models: OnnxModels, element: int, array: Array, reserves: bool) -> None:
    lab.reserves = reserves
    models.write_unary("Identity", element, ["N", 2], ["N", 2])
    backend = models.loaded()
    bf16 = ["A"] if element == TensorProto.BFLOAT16 else []
    requests = [lab.request({"A": np.stack([array] * size)}, bf16=bf16) for size in (1, 2)]
    backend.execute(requests, lab.timings)
    backend.execute([alone := lab.request({"A": array.reshape(1, 2)}, bf16=bf16)], lab.timings)
    for request, size in (*zip(requests, (1, 2), strict=True), (alone, 1)):
        found = lab.outputs(request)["X"]
        if element == TensorProto.STRING:
            found = np.array([text.encode() for text in found.reshape(-1)], object).reshape(found.shape)
        assert found.dtype == array.dtype
        assert found.tolist() == [array.tolist()] * size


def test_a_string_that_is_not_utf8_is_refused(lab: Lab, models: OnnxModels) -> None:
    models.write_unary("Identity", TensorProto.STRING, [1], [1])
    backend = models.loaded()
    with pytest.raises(InvalidArgument, match="input 'A' has a string that is not UTF-8"):
        backend.execute([lab.request({"A": np.array([b"\xff"], object)})], lab.timings)


def test_a_scalar_is_one_element_for_clients(lab: Lab, models: OnnxModels) -> None:
    models.write_unary("Neg", FLOAT, [], [])
    backend = models.loaded()
    request = lab.request({"A": np.array([3], np.float32)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["X"].tolist() == [-3]


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2, 2), (1,)])
def test_a_model_without_shapes_takes_those_of_the_configuration(
    lab: Lab, models: OnnxModels, shape: tuple[int, ...]
) -> None:
    models.write([("Neg", ["A"], ["X"])], [("A", FLOAT, None)], [("X", FLOAT, None)])
    entries = {key: [{"name": name, "data_type": "TYPE_FP32", "dims": [-1] * len(shape)}] for key, name in
               (("input", "A"), ("output", "X"))}  # fmt: skip
    backend = models.loaded(entries)
    request = lab.request({"A": floats(*shape)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["X"].tolist() == (-floats(*shape)).tolist()


def test_the_log_explains_shapes_that_clients_see_with_one_dimension_more(lab: Lab, models: OnnxModels) -> None:
    models.write_unary("Neg", FLOAT, ["N"], ["N"])
    models.completed()
    line, _ = [text for _, text in lab.logged if "reshape" in text]
    assert 'input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } } ]' in line


def test_a_scalar_per_row_is_one_element_per_row_for_clients(lab: Lab, models: OnnxModels) -> None:
    models.write_unary("Neg", FLOAT, ["N"], ["N"])
    backend = models.loaded()
    requests = [lab.request({"A": floats(size, 1)}) for size in (1, 2)]
    backend.execute(requests, lab.timings)
    assert lab.outputs(requests[1])["X"].tolist() == [[0], [-1]]


def test_an_optional_input_replaces_a_constant(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Add", ["A", "W"], ["X"])],
        [("A", FLOAT, [2]), ("W", FLOAT, [1])],
        [("X", FLOAT, [2])],
        {"W": np.array([5], np.float32)},
    )
    entries: list[dict[str, Any]] = [
        {"name": "A", "data_type": "TYPE_FP32", "dims": [2]},
        {"name": "W", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
    ]
    backend = models.loaded({"input": entries})
    for lab.reserves in (False, True):
        without = lab.request({"A": floats(2)})
        given = lab.request({"A": floats(2), "W": np.ones(1, np.float32)})
        backend.execute([without], lab.timings)
        backend.execute([given], lab.timings)
        assert lab.outputs(without)["X"].tolist() == [5, 6]
        assert lab.outputs(given)["X"].tolist() == [1, 2]


def test_ragged_batches_are_joined_and_divided(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Neg", ["A"], ["X"]), ("Identity", ["COUNT"], ["Y"])],
        [("A", FLOAT, ["elements"]), ("COUNT", FLOAT, ["requests"])],
        [("X", FLOAT, ["elements"]), ("Y", FLOAT, ["requests"])],
    )
    config = {
        "max_batch_size": 4,
        "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
        "batch_input": [
            {
                "kind": "BATCH_ELEMENT_COUNT",
                "target_name": ["COUNT"],
                "data_type": "TYPE_FP32",
                "source_input": ["A"],
            }
        ],
        "output": [
            {"name": "X", "data_type": "TYPE_FP32", "dims": [-1]},
            {"name": "Y", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}},
        ],
        "batch_output": [{"target_name": ["X"], "source_input": ["A"]}],
    }
    backend = models.loaded(config)
    one, two = lab.request({"A": floats(1, 2)}), lab.request({"A": floats(1, 3)})
    backend.execute([one, two], lab.timings)
    assert lab.outputs(one)["X"].tolist() == [[0, -1]]
    assert lab.outputs(two)["X"].tolist() == [[0, -1, -2]]
    assert lab.outputs(two)["Y"].tolist() == [[3]]


# ---- the demo's model -----------------------------------------------------------------------


def digits(config: dict[str, Any]) -> ModelArguments:
    return ModelArguments({"name": "digits", **config}, DEMO / "digits", 1)


def test_the_demo_model_is_completed_without_a_configuration(lab: Lab) -> None:
    config = OnnxRuntimeBackend(lab).complete(digits({}))
    assert config["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": [8, 8]}]
    assert config["output"] == [{"name": "scores", "data_type": "TYPE_FP32", "dims": [10]}]
    assert config["max_batch_size"] == 4


def test_the_demo_model_classifies_digits(lab: Lab) -> None:
    backend = OnnxRuntimeBackend(lab)
    backend.load(digits(backend.complete(digits({"max_batch_size": 64}))))
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the images")
    images, labels = datasets.load_digits(return_X_y=True)
    requests = [lab.request({"image": image.astype(np.float32).reshape(1, 8, 8)}) for image in images[:64]]
    backend.execute(requests, lab.timings)
    found = [int(np.argmax(lab.outputs(request)["scores"])) for request in requests]
    assert np.mean(found == labels[:64]) >= 0.97


def test_the_demo_request_shows_a_six(lab: Lab) -> None:
    backend = OnnxRuntimeBackend(lab)
    backend.load(digits(backend.complete(digits({}))))
    sample = json.loads((DEMO / "digit.json").read_text())["inputs"][0]
    image = np.array(sample["data"], np.float32).reshape(sample["shape"])
    request = lab.request({sample["name"]: image})
    backend.execute([request], lab.timings)
    scores = lab.outputs(request)["scores"]
    labels = (DEMO / "digits" / "labels.txt").read_text().split()
    assert labels[int(np.argmax(scores))] == "six"
    assert scores.sum() == pytest.approx(1)
