from __future__ import annotations

from pathlib import Path

import pytest

from backends.onnxruntime.gpu.tensorrt_options import tensorrt_options
from kernel.errors import InvalidArgument

VERSION = Path("/models/m/1")


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {}),
        ({"precision_mode": "FP32"}, {}),
        ({"precision_mode": "FP16"}, {"trt_fp16_enable": "True"}),
        ({"precision_mode": "BF16"}, {"trt_bf16_enable": "True"}),
        ({"precision_mode": "INT8"}, {"trt_int8_enable": "True"}),
        ({"max_workspace_size_bytes": "1073741824"}, {"trt_max_workspace_size": "1073741824"}),
        (
            {"int8_calibration_table_name": "table", "int8_use_native_calibration_table": "1"},
            {"trt_int8_calibration_table_name": "table", "trt_int8_use_native_calibration_table": "True"},
        ),
        (
            {"trt_engine_cache_enable": "true", "trt_engine_cache_path": "cache", "trt_cuda_graph_enable": "off"},
            {
                "trt_engine_cache_enable": "True",
                "trt_engine_cache_path": "/models/m/1/cache",
                "trt_cuda_graph_enable": "False",
            },
        ),
        (
            {"trt_extra_plugin_lib_paths": "../a.so;b.so"},
            {"trt_extra_plugin_lib_paths": "/models/m/a.so;/models/m/1/b.so"},
        ),
        ({"trt_profile_min_shapes": "x:1x3"}, {"trt_profile_min_shapes": "x:1x3"}),
    ],
)  # fmt: skip
def test_parameters_become_options_as_in_triton(parameters: dict[str, str], options: dict[str, str]) -> None:
    assert tensorrt_options(parameters, VERSION) == options


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"precision_mode": "FP4"}, "unsupported precision mode 'FP4' is requested"),
        ({"max_workspace_size_bytes": "much"}, "failed to convert 'much' to integral number"),
        ({"trt_dla_enable": "perhaps"}, "failed to convert 'perhaps' to boolean"),
        ({"trt_max_workspace_size": "1"},
         "unknown parameter 'trt_max_workspace_size' is provided for TensorRT Execution Accelerator"),
        ({"speed": "high"}, "unknown parameter 'speed' is provided for TensorRT Execution Accelerator"),
        ({"trt_timing_cache_path": "/etc/cache"},
         "parameter 'trt_timing_cache_path' of the accelerator 'tensorrt' is outside the model's folder: '/etc/cache'"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        tensorrt_options(parameters, VERSION)
    assert refused.value.message == text
