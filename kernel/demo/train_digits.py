"""Trains the demo's digit classifier, and writes it as ONNX with a sample request.

    python kernel/demo/train_digits.py

It needs onnx and scikit-learn, which contains the training data (1797 images of 8 x 8 pixels, UCI). The server
needs neither package. The network: pixels → 128 (ReLU) → 10 (softmax).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

DEMO = Path(__file__).parent
INK = 16.0  # the largest pixel value
SEED = 7


def to_onnx(network: MLPClassifier) -> onnx.ModelProto:
    """Return the trained network as a model from `image` [N, 8, 8] to `scores` [N, 10]."""
    (weights1, weights2), (bias1, bias2) = network.coefs_, network.intercepts_
    constants = {"ink": np.array(INK), "w1": weights1, "b1": bias1, "w2": weights2, "b2": bias2}
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["pixels"]),
            helper.make_node("Div", ["pixels", "ink"], ["scaled"]),
            helper.make_node("Gemm", ["scaled", "w1", "b1"], ["sums"]),
            helper.make_node("Relu", ["sums"], ["hidden"]),
            helper.make_node("Gemm", ["hidden", "w2", "b2"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["scores"]),
        ],
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def sample_request(image: np.ndarray) -> str:
    """Return the body of an infer request for one image, with one line per row of pixels."""
    rows = ",\n".join("      " + json.dumps([[int(pixel) for pixel in row]])[1:-1].replace(", ", ",") for row in image)
    return (
        '{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [\n'
        f"{rows}\n"
        ']}],\n "outputs": [{"name": "scores", "parameters": {"classification": 3}}]}\n'
    )


def main() -> None:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.data, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target
    )
    network = MLPClassifier((128,), alpha=0.01, max_iter=400, random_state=SEED)
    network.fit(train_x / INK, train_y)
    found = network.predict(test_x / INK)
    print(f"accuracy on {len(test_y)} held-out images: {np.mean(found == test_y):.1%}")

    folder = DEMO / "digits" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(network), folder / "model.onnx")
    certainty = network.predict_proba(test_x / INK).max(axis=1)
    # A correct but not certain result, so that the second and third best classes are interesting.
    chosen = int(np.flatnonzero((found == test_y) & (certainty > 0.8) & (certainty < 0.95))[0])
    (DEMO / "digit.json").write_text(sample_request(test_x[chosen].reshape(8, 8)))


if __name__ == "__main__":
    main()
