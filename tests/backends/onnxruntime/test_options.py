from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from backends.base import ModelArguments
from backends.onnxruntime.options import custom_op_libraries, model_path, run_options, session_options
from kernel.errors import InvalidArgument


def arguments(
    parameters: dict[str, str] | None = None,
    *,
    kind: str = "CPU",
    root: Path = Path("/repository"),
    **config: Any,
) -> ModelArguments:
    given = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    return ModelArguments({"name": "m", "parameters": given, **config}, root / "m", 1, "m_0", kind, 1)


def test_without_parameters_the_defaults_of_onnx_runtime_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    options, defaults = session_options(arguments()), ort.SessionOptions()
    assert options.intra_op_num_threads == defaults.intra_op_num_threads == 0
    assert options.inter_op_num_threads == 0
    assert options.enable_cpu_mem_arena == defaults.enable_cpu_mem_arena
    assert options.enable_mem_pattern == defaults.enable_mem_pattern
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL


def test_a_worker_with_limited_cpus_has_one_thread_per_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("kernel.machine.processor_count", lambda: 3)
    assert session_options(arguments()).intra_op_num_threads == 3
    assert session_options(arguments({"intra_op_thread_count": "7"})).intra_op_num_threads == 7


def test_parameters_have_tritons_names() -> None:
    options = session_options(
        arguments(
            {
                "intra_op_thread_count": "3",
                "inter_op_thread_count": "2",
                "execution_mode": "1",
                "enable_mem_arena": "Off",
                "enable_mem_pattern": "0",
                "session.intra_op.allow_spinning": "0",
            }
        )
    )
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 2
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(
    ("level", "expected"), [(-1, "ORT_ENABLE_BASIC"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")]
)
def test_graph_levels_have_tritons_meaning(level: int, expected: str) -> None:
    options = session_options(arguments(optimization={"graph": {"level": level}}))
    assert options.graph_optimization_level.name == expected


def test_a_parameter_lets_runs_shrink_the_arena() -> None:
    assert run_options(arguments()) is None
    options = run_options(arguments({"memory.enable_memory_arena_shrinkage": "cpu:0"}))
    assert options is not None
    assert options.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"
    assert options.get_run_config_entry("gpu_graph_id") == "-1", "without it a bound run takes 30 µs more"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"intra_op_thread_count": "two"}, "failed to convert 'two' to integral number"),
        ({"enable_mem_arena": "perhaps"}, "failed to convert 'perhaps' to boolean"),
        (
            {"execution_mode": "2"},
            ("Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 ."),
        ),
        (
            {"session.model_external_initializers_file_folder_path": "/etc"},
            "parameter 'session.model_external_initializers_file_folder_path' of model 'm' is not allowed",
        ),
    ],
)
def test_wrong_values_are_refused(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        session_options(arguments(parameters))
    assert caught.value.message == text


def test_the_model_file_may_be_in_a_folder(tmp_path: Path) -> None:
    assert model_path(arguments(root=tmp_path)) == tmp_path / "m/1/model.onnx"
    named = arguments(root=tmp_path, default_model_filename="net.onnx")
    (tmp_path / "m/1/net.onnx").mkdir(parents=True)
    assert model_path(named) == tmp_path / "m/1/net.onnx/model.onnx"


@pytest.mark.parametrize("name", ["../../other/1/model.onnx", "/etc/passwd"])
def test_files_outside_the_models_folder_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is outside the folder of model 'm'"):
        model_path(arguments(default_model_filename=name))
    with pytest.raises(InvalidArgument, match=r"custom operator library .* is outside the folder of model 'm'"):
        custom_op_libraries(arguments(model_operations={"op_library_filename": [name]}))


def test_custom_operators_are_found_beside_the_model() -> None:
    given = arguments(model_operations={"op_library_filename": ["ops.so", "../shared.so"]})
    assert custom_op_libraries(given) == [Path("/repository/m/1/ops.so"), Path("/repository/m/shared.so")]
