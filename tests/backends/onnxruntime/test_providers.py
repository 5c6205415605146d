from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.base import ModelArguments
from backends.onnxruntime.options import graph_run_options
from backends.onnxruntime.providers import graph_obstacle, ignored_settings, providers, tensorrt_options, wanted_graphs
from kernel.errors import InvalidArgument, ServingError, Unsupported

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


def arguments(parameters: dict[str, str] | None = None, *, kind: str = "CPU", **config: Any) -> ModelArguments:
    given = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    return ModelArguments({"name": "m", "parameters": given, **config}, Path("/repository/m"), 1, "m_0", kind, 1)


def test_cpu_instances_use_only_the_cpu() -> None:
    assert providers(arguments(), ["CUDAExecutionProvider", CPU]) == [(CPU, {})]


def test_gpu_instances_prefer_their_gpu() -> None:
    accelerators = {"gpu_execution_accelerator": [{"name": "cuda", "parameters": {"use_tf32": "0"}}]}
    given = arguments(kind="GPU", optimization={"execution_accelerators": accelerators})
    cuda = ("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "1"})
    assert providers(given, ["CUDAExecutionProvider", CPU]) == [cuda, (CPU, {})]


def test_a_gpu_instance_needs_an_onnxruntime_for_gpus() -> None:
    with pytest.raises(Unsupported) as caught:
        providers(arguments(kind="GPU"), [CPU])
    assert caught.value.message == (
        "instance 'm_0' of kind KIND_GPU needs an onnxruntime with the CUDAExecutionProvider, but the "
        "installed one has only CPUExecutionProvider"
    )


@pytest.mark.parametrize(
    ("kind", "side", "name", "text"),
    [
        ("CPU", "cpu", "turbo", "unknown Execution Accelerator 'turbo' is requested"),
        ("GPU", "gpu", "turbo", "unknown Execution Accelerator 'turbo' is requested"),
    ],
)
def test_unavailable_accelerators_are_refused(kind: str, side: str, name: str, text: str) -> None:
    accelerators = {f"{side}_execution_accelerator": [{"name": name}]}
    given = arguments(kind=kind, optimization={"execution_accelerators": accelerators})
    with pytest.raises(ServingError) as caught:
        providers(given, ["CUDAExecutionProvider", CPU])
    assert caught.value.message.startswith(text)


def test_openvino_is_used_if_it_is_installed() -> None:
    accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    given = arguments(optimization={"execution_accelerators": accelerators})
    openvino = "OpenVINOExecutionProvider"
    assert providers(given, [openvino, CPU]) == [(openvino, {"device_type": "CPU"}), (CPU, {})]
    assert ignored_settings(given, [openvino, CPU]) == []


def test_without_openvino_the_model_runs_without_it_and_the_log_says_so() -> None:
    accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    given = arguments(optimization={"execution_accelerators": accelerators})
    assert providers(given, [CPU]) == [(CPU, {})]
    assert ignored_settings(given, [CPU]) == [
        "the 'openvino' accelerator of model 'm' has no effect: the installed onnxruntime has no "
        "OpenVINOExecutionProvider, or cannot load the libraries that this needs. The model runs without it"
    ]
    assert ignored_settings(arguments(), [CPU]) == []


def test_parameters_for_gpus_without_effect_are_named() -> None:
    given = {"gpu_mem_limit": "1", "intra_op_thread_count": "2", "mine": "3"}
    assert ignored_settings(arguments(given), [CPU]) == [
        "parameter 'gpu_mem_limit' of model 'm' has no effect: the instance runs on the CPU"
    ]
    assert ignored_settings(arguments(given, kind="GPU"), [CUDA, CPU]) == []


def on_gpu(parameters: dict[str, str], **accelerators: dict[str, str]) -> ModelArguments:
    found = [{"name": name, "parameters": each} for name, each in accelerators.items()]
    optimization = {"execution_accelerators": {"gpu_execution_accelerator": found}}
    return arguments(parameters, kind="GPU", optimization=optimization)


@pytest.mark.parametrize(
    ("parameters", "accelerator", "options"),
    [
        ({}, {}, {}),
        ({"cudnn_conv_algo_search": "0"}, {}, {"cudnn_conv_algo_search": "EXHAUSTIVE"}),
        ({"cudnn_conv_algo_search": "1"}, {}, {"cudnn_conv_algo_search": "HEURISTIC"}),
        ({"cudnn_conv_algo_search": "2"}, {}, {"cudnn_conv_algo_search": "DEFAULT"}),
        ({"arena_extend_strategy": "0"}, {}, {"arena_extend_strategy": "kNextPowerOfTwo"}),
        ({"arena_extend_strategy": "1"}, {}, {"arena_extend_strategy": "kSameAsRequested"}),
        ({"gpu_mem_limit": "4294967296"}, {}, {"gpu_mem_limit": "4294967296"}),
        ({"do_copy_in_default_stream": "false"}, {}, {"do_copy_in_default_stream": "0"}),
        ({}, {"do_copy_in_default_stream": "true"}, {"do_copy_in_default_stream": "1"}),
        ({}, {"use_ep_level_unified_stream": "on"}, {"use_ep_level_unified_stream": "1"}),
        ({}, {"cudnn_conv_use_max_workspace": "0", "empty": ""}, {"cudnn_conv_use_max_workspace": "0"}),
        ({"gpu_mem_limit": "2"}, {"gpu_mem_limit": "1", "use_tf32": "1"}, {"gpu_mem_limit": "2", "use_tf32": "1"}),
        ({}, {"enable_cuda_graph": "1"}, {}),
    ],
)  # fmt: skip
def test_cuda_gets_its_options_as_in_triton(
    parameters: dict[str, str], accelerator: dict[str, str], options: dict[str, str]
) -> None:
    given = on_gpu(parameters, cuda=accelerator)
    assert providers(given, [CUDA, CPU]) == [(CUDA, {**options, "device_id": "1"}), (CPU, {})]


@pytest.mark.parametrize(
    ("parameters", "accelerator", "text"),
    [
        ({"cudnn_conv_algo_search": "3"}, {}, "unsupported cudnn_conv_algo_search value '3' is requested"),
        ({"arena_extend_strategy": "2"}, {}, "unsupported arena_extend_strategy value '2' is requested"),
        ({"gpu_mem_limit": "all"}, {}, "failed to convert 'all' to integral number"),
        ({}, {"do_copy_in_default_stream": "x"}, "failed to convert 'x' to boolean"),
    ],
)
def test_wrong_options_of_cuda_are_refused(parameters: dict[str, str], accelerator: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        providers(on_gpu(parameters, cuda=accelerator), [CUDA, CPU])
    assert refused.value.message == text


def test_providers_on_a_gpu_share_the_stream_of_the_instance() -> None:
    given = on_gpu({}, tensorrt={"precision_mode": "FP16"}, cuda={"use_tf32": "0"})
    device = {"device_id": "1", "has_user_compute_stream": "1", "user_compute_stream": "4711"}
    assert providers(given, [TENSORRT, CUDA, CPU], 4711) == [
        (TENSORRT, {"trt_fp16_enable": "True", **device}),
        (CUDA, {"use_tf32": "0", **device}),
        (CPU, {}),
    ]
    assert providers(given, [CUDA, CPU]) == [(CUDA, {"use_tf32": "0", "device_id": "1"}), (CPU, {})]


@pytest.mark.parametrize(
    ("accelerator", "cuda", "sizes", "required"),
    [
        ({}, {}, [], False),
        ({"enable_cuda_graph": "0"}, {}, [], False),
        ({"enable_cuda_graph": "1"}, {}, [1, 2, 3, 4, 6, 8], True),
        ({}, {"graphs": True}, [1, 2, 3, 4, 6, 8], False),
        ({"enable_cuda_graph": "true"}, {"graph_spec": [{"batch_size": 5}]}, [5], True),
        ({"enable_cuda_graph": ""}, {"graphs": True, "graph_spec": [{"batch_size": 3}]}, [3], False),
    ],
)
def test_the_configuration_says_which_graphs_are_captured(
    accelerator: dict[str, str], cuda: dict[str, Any], sizes: list[int], required: bool
) -> None:
    given = on_gpu({}, cuda=accelerator)
    config = {**given.config, "max_batch_size": 8}
    config["optimization"] = {**config["optimization"], "cuda": cuda}
    specs, asked = wanted_graphs(msgspec.structs.replace(given, config=config))
    assert ([spec.batch_size for spec in specs], asked) == (sizes, required)


def test_a_session_that_captures_graphs_has_the_option_and_others_have_not() -> None:
    given = on_gpu({}, cuda={"enable_cuda_graph": "1", "use_tf32": "0"})
    device = {"device_id": "1", "has_user_compute_stream": "1", "user_compute_stream": "4711"}
    for graphs, more in ((True, {"enable_cuda_graph": "1"}), (False, {})):
        found = providers(given, [CUDA, CPU], 4711, graphs=graphs)
        assert found == [(CUDA, {"use_tf32": "0", **device, **more}), (CPU, {})]
    assert ignored_settings(given, [CUDA, CPU]) == []


def test_a_graph_that_would_compute_with_the_first_batch_is_left_out_and_the_log_says_so() -> None:
    given = on_gpu({}, tensorrt={"trt_cuda_graph_enable": "1", "precision_mode": "FP16"})
    assert providers(given, [TENSORRT, CUDA, CPU])[0] == (TENSORRT, {"trt_fp16_enable": "True", "device_id": "1"})
    (line,) = ignored_settings(given, [TENSORRT, CUDA, CPU])
    assert line.startswith("parameter 'trt_cuda_graph_enable' of the 'tensorrt' accelerator of model 'm' has no effect")
    off = on_gpu({}, tensorrt={"trt_cuda_graph_enable": "0"})
    assert ignored_settings(off, [TENSORRT, CUDA, CPU]) == []


def test_runs_name_their_graph() -> None:
    given = on_gpu({"memory.enable_memory_arena_shrinkage": "gpu:0"}, cuda={})
    for number in (-1, 3):
        found = graph_run_options(given, number)
        assert found.get_run_config_entry("gpu_graph_id") == str(number)
        assert found.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        assert found.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:0"


def test_models_with_tensors_on_the_host_can_have_no_graphs() -> None:
    assert graph_obstacle({"input": [{"name": "A", "data_type": "TYPE_FP32"}]}) == ""
    assert "'S' has strings" in graph_obstacle({"output": [{"name": "S", "data_type": "TYPE_STRING"}]})
    assert "implicit state" in graph_obstacle({"sequence_batching": {"state": [{"input_name": "A"}]}})


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
