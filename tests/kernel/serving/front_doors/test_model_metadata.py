from __future__ import annotations

import msgspec

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.serving.front_doors.model_metadata import model_metadata


def spec(platform: str = "") -> ModelSpec:
    return ModelSpec(
        name="m",
        platform=platform,
        backend="python",
        max_batch_size=4,
        inputs={"IN": TensorSpec("IN", "FP32", (6,), (-1, 6), reshape=(2, 3))},
        outputs={"OUT": TensorSpec("OUT", "INT64", (-1,), (-1, -1))},
    )


def test_the_json_is_triton_s() -> None:
    assert msgspec.json.encode(model_metadata(spec(), [1, 3])) == (
        b'{"name":"m","versions":["1","3"],"platform":"python",'
        b'"inputs":[{"name":"IN","datatype":"FP32","shape":[-1,6]}],'
        b'"outputs":[{"name":"OUT","datatype":"INT64","shape":[-1,-1]}]}'
    )


def test_the_platform_comes_before_the_backend() -> None:
    assert model_metadata(spec("onnxruntime_onnx"), []).platform == "onnxruntime_onnx"
