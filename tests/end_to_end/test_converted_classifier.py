"""A classifier as `skl2onnx` converts it: its probabilities are a sequence of maps, which no client can get."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

import onnx
import pytest
from onnx import TensorProto, helper

from bench.server import ServerFailed, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path


def save_classifier(file: Path, *, outputs: tuple[str, ...] = ("output_label", "output_probability")) -> None:
    """Write the graph of a logistic regression with two classes over two numbers: the larger one decides."""
    ml = "ai.onnx.ml"
    nodes = [
        helper.make_node(
            "LinearClassifier", ["X"], ["label", "scores"], domain=ml, classlabels_ints=[3, 8],
            coefficients=[1.0, -1.0, -1.0, 1.0], intercepts=[0.0, 0.0], multi_class=1, post_transform="SOFTMAX",
        ),
        helper.make_node("Cast", ["label"], ["output_label"], to=TensorProto.INT64),
        helper.make_node("ZipMap", ["scores"], ["output_probability"], domain=ml, classlabels_int64s=[3, 8]),
    ]  # fmt: skip
    probabilities = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    )
    made = {
        "output_label": helper.make_tensor_value_info("output_label", TensorProto.INT64, [None]),
        "output_probability": helper.make_value_info(
            "output_probability", helper.make_sequence_type_proto(probabilities)
        ),
    }
    given = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 2])]
    graph = helper.make_graph(nodes, "classifier", given, [made[name] for name in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ml, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)


def test_the_labels_of_a_converted_classifier_are_served(tmp_path: Path) -> None:
    save_classifier(tmp_path / "classifier.onnx")
    with ServerProcess(tmp_path / "classifier.onnx") as server:
        server.wait_for_log("an output that is no tensor is left out: 'output_probability' (seq(map(int64,tensor(flo")
        server.wait_for_log("converted with the option zipmap=False")
        given = {"name": "X", "datatype": "FP32", "shape": [3, 2], "data": [1, 0, 0, 1, 5, 2]}
        body = json.dumps({"inputs": [given]}).encode()
        url = f"http://{server.url}/v2/models/classifier"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/infer", body)) as response:
            outputs = json.load(response)["outputs"]
        with urllib.request.urlopen(url) as response:
            described = json.load(response)["outputs"]
        assert server.log.count("an output that is no tensor is left out") == 1, "said once for all instances"
    assert [(each["name"], each["data"]) for each in outputs] == [("output_label", [3, 8, 3])]
    assert [each["name"] for each in described] == ["output_label"]


def test_a_model_without_any_tensor_among_its_outputs_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path / "classifier.onnx", outputs=("output_probability",))
    with pytest.raises(ServerFailed, match="Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE'.*zipmap=False"):
        ServerProcess(tmp_path / "classifier.onnx").start()
