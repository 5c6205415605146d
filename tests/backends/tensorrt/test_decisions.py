from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.base import ModelArguments
from backends.tensorrt.configuration import autofill, check_agreement
from backends.tensorrt.plan import plan_file, plan_hint
from backends.tensorrt.profiles import choose_profile, graph_key, group_of, instance_profiles, misfit
from backends.tensorrt.settings import EngineSettings, engine_settings
from backends.tensorrt.signature import EngineSignature, EngineTensor, Extent, Profile
from backends.worker.devices.graph_specs import GraphKey, best_graph, graph_specs
from kernel.errors import ServingError


def tensor(name: str, *dims: int, output: bool = False, engine_type: str = "FLOAT", **more: Any) -> EngineTensor:
    return EngineTensor(name, not output, engine_type, dims, **more)


def signature(*tensors: EngineTensor, most: int = 8, **values: Extent) -> EngineSignature:
    """Return the signature of an engine whose variable dimensions are 1 to `most`, best 2."""
    dims = {
        each.name: Extent(*(tuple(size if dim == -1 else dim for dim in each.dims) for size in (1, 2, most)))
        for each in tensors
        if each.is_input
    }
    return EngineSignature({each.name: each for each in tensors}, (Profile(0, dims, values),))


def entry(name: str, *dims: int, data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


IDENTITY = signature(tensor("A", -1, 4), tensor("X", -1, 4, output=True))


def refusal(engine: EngineSignature, **config: Any) -> str:
    with pytest.raises(ServingError) as caught:
        check_agreement({"name": "m", **config}, engine, "m_0_0")
    return caught.value.message


def unfilled(engine: EngineSignature, **config: Any) -> str:
    with pytest.raises(ServingError) as caught:
        autofill({"name": "m", **config}, engine)
    return caught.value.message


# ---- completing -----------------------------------------------------------------------------


def test_a_configured_batch_size_within_the_profile_is_kept() -> None:
    filled = autofill({"name": "m", "max_batch_size": 3}, IDENTITY)
    assert filled["max_batch_size"] == 3
    assert filled["input"] == [entry("A", 4)]


def test_a_batch_size_above_the_profile_is_refused() -> None:
    assert unfilled(IDENTITY, max_batch_size=9) == (
        "autofill failed for model 'm': configuration specified max-batch 9 but TensorRT engine only supports "
        "max-batch 8"
    )


def test_dimensions_with_the_batch_dimension_say_that_the_model_does_not_batch() -> None:
    filled = autofill({"name": "m", "input": [entry("A", -1, 4)]}, IDENTITY)
    assert filled["max_batch_size"] == 0
    assert "dynamic_batching" not in filled
    assert filled["output"] == [entry("X", -1, 4)]


def test_contradicting_dimensions_are_refused() -> None:
    text = unfilled(IDENTITY, input=[entry("A", 4)], output=[entry("X", -1, 4)])
    assert text == (
        "unable to autofill for 'm', model tensor configurations are contradicting each other in terms of whether "
        "batching is supported"
    )


def test_dimensions_of_a_batching_model_do_not_fit_an_engine_that_cannot_batch() -> None:
    engine = signature(tensor("A", 2, 4), tensor("X", 2, 4, output=True))
    assert unfilled(engine, input=[entry("A", 4)]) == (
        "autofill failed for model 'm': model tensor shape configuration hints for dynamic batching but the underlying "
        "engine doesn't support batching."
    )
    assert autofill({"name": "m"}, engine)["max_batch_size"] == 0


def test_entries_keep_what_they_say_and_get_what_they_miss() -> None:
    filled = autofill({"name": "m", "input": [{"name": "A", "format": "FORMAT_NONE"}]}, IDENTITY)
    assert filled["input"] == [{"name": "A", "format": "FORMAT_NONE", "data_type": "TYPE_FP32", "dims": [4]}]


def test_the_first_value_of_a_shape_tensor_is_the_number_of_rows() -> None:
    shape = tensor("S", 3, engine_type="INT32", is_shape_tensor=True)
    engine = signature(tensor("A", -1, 4), shape, S=Extent((1, 1, 1), (2, 2, 2), (6, 9, 9)))
    filled = autofill({"name": "m"}, engine)
    assert filled["max_batch_size"] == 6
    assert filled["input"][1] == entry("S", 2, data_type="TYPE_INT32", is_shape_tensor=True)


def test_an_unknown_tensor_is_refused_with_those_of_the_engine() -> None:
    assert unfilled(IDENTITY, input=[entry("B", 4)]) == "unexpected inference input 'B', allowed inputs are: A"


# ---- checking -------------------------------------------------------------------------------


def test_a_configuration_that_agrees_with_the_engine_is_accepted() -> None:
    config = {"name": "m", "max_batch_size": 8, "input": [entry("A", -1)], "output": [entry("X", 4)]}
    check_agreement(config, IDENTITY, "m_0_0")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"input": [entry("A", 4), entry("B", 4)]},
         "unable to load model 'm', configuration expects 2 inputs, model provides at most 1"),
        ({"input": [entry("B", -1, 4)]}, "unexpected inference input 'B', allowed inputs are: A"),
        ({"input": [entry("A", -1, 4, data_type="TYPE_STRING")]},
         "unsupported datatypeTYPE_STRING for input 'A' for model 'm'"),
        ({"input": [entry("A", -1, 4, data_type="TYPE_FP16")]},
         "unexpected datatype TYPE_FP32 for inference input 'A', expecting TYPE_FP16 for m_0_0"),
        ({"input": [entry("A", -1, 4, is_shape_tensor=True)]},
         "input 'A' for model 'm' is incorrectly marked as a shape tensor in the model configuration."),
        ({"input": [entry("A", -1, 5)]},
         "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 2 "
         "dimensions (shape [-1,5])"),
        ({"max_batch_size": 2, "input": [entry("A", 5)]},
         "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 2 "
         "dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
         "making complete shape [-1,5])"),
        ({"input": [entry("A", -1, 4)]}, "expected configuration for output 'X' for m_0_0"),
    ],
)  # fmt: skip
def test_contradictions_have_triton_s_texts(config: dict[str, Any], text: str) -> None:
    assert refusal(IDENTITY, **config) == text


def test_a_shape_tensor_must_be_marked_and_have_its_dimensions() -> None:
    engine = signature(tensor("S", 3, engine_type="INT32", is_shape_tensor=True))
    entries = entry("S", 3, data_type="TYPE_INT32")
    assert refusal(engine, input=[entries]).startswith("input 'S' for model 'm' is a shape tensor but the model")
    assert refusal(engine, input=[{**entries, "is_shape_tensor": True, "dims": [2]}]) == (
        "unable to load model 'm', binding 'S' shape expected by framework [3] doesn't match model configuration shape "
        "[2]"
    )


def test_special_formats_of_tensors_are_refused() -> None:
    engine = signature(tensor("A", -1, 4, special_format="CHW4"))
    assert "input 'A' of model 'm' has the memory format CHW4; this server supports" in refusal(engine)


# ---- profiles -------------------------------------------------------------------------------


def profile(index: int, low: int, best: int, high: int) -> Profile:
    return Profile(index, {"A": Extent((low, 4), (best, 4), (high, 4))})


def test_an_instance_has_the_profiles_of_its_group() -> None:
    groups = [{"name": "m_0", "profile": ["0"]}, {"name": "m_0_b", "profile": ["2", "1", "2"]}]
    config = {"name": "m", "instance_group": groups}
    assert instance_profiles(config, "m_0_b_1", 3) == [("1", 1), ("2", 2)]
    assert instance_profiles({"name": "m"}, "m_0_0", 3) == [("default", 0)]
    assert group_of(config, "") is groups[0]


def test_an_instance_cannot_have_a_profile_that_the_engine_lacks() -> None:
    with pytest.raises(ServingError, match="range 0-1$"):
        instance_profiles({"name": "m", "instance_group": [{"name": "m", "profile": ["2"]}]}, "m_0", 2)


def test_the_nearest_profile_is_chosen_and_the_first_of_equal_ones() -> None:
    candidates = [("a", profile(0, 1, 2, 8)), ("b", profile(1, 1, 6, 8)), ("c", profile(2, 9, 9, 16))]
    chosen = [choose_profile(candidates, {"A": (rows, 4)}, {}) for rows in (1, 4, 5, 8, 12)]
    assert chosen == [0, 0, 1, 1, 2]


def test_shapes_that_no_profile_supports_are_refused() -> None:
    candidates = [("0", profile(0, 1, 2, 8)), ("1", profile(1, 1, 6, 8))]
    with pytest.raises(ServingError) as caught:
        choose_profile(candidates, {"A": (9, 4)}, {})
    assert caught.value.message == (
        "failed to find any Optimization Profile among [ 0[0] 1[1]] to support the requested dimensions (or shape "
        "values)"
    )


def test_a_wrong_number_of_dimensions_fits_no_profile() -> None:
    assert misfit(profile(0, 1, 2, 8), {"A": (4,)}, {}) == (
        "A",
        "model expected 2 dimensions but received 1 dimensions",
    )


# ---- CUDA graphs ----------------------------------------------------------------------------


def graphs(**config: Any) -> list[int]:
    cuda = {"graphs": True}
    return [spec.batch_size for spec in graph_specs({"name": "m", "optimization": {"cuda": cuda}, **config})]


def test_the_usual_batch_sizes_have_graphs() -> None:
    assert graphs() == [0]
    assert graphs(max_batch_size=10) == [1, 2, 3, 4, 6, 8, 10]
    assert graphs(max_batch_size=32, dynamic_batching={"preferred_batch_size": [4, 8]}) == [1, 4, 8, 32]
    assert graphs(max_batch_size=6, sequence_batching={"oldest": {"preferred_batch_size": [2]}}) == [1, 2, 6]
    assert graph_specs({"name": "m", "max_batch_size": 8}) == []


@pytest.mark.parametrize(
    ("spec", "max_batch_size", "text"),
    [
        ({"batch_size": 1}, 0, "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0"),
        ({"batch_size": 9}, 8, "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        ({"batch_size": 2, "graph_lower_bound": {"batch_size": 3}}, 8,
         "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'"),
        ({"batch_size": 2, "input": {"A": {"dim": ["4"]}}, "graph_lower_bound": {"batch_size": 1}}, 8,
         "graph lower bound spec expects shape for input 'A'"),
    ],
)  # fmt: skip
def test_wrong_graph_specifications_are_refused(spec: dict[str, Any], max_batch_size: int, text: str) -> None:
    config = {
        "name": "m",
        "max_batch_size": max_batch_size,
        "optimization": {"cuda": {"graphs": True, "graph_spec": [spec]}},
    }
    with pytest.raises(ServingError) as caught:
        graph_specs(config)
    assert caught.value.message == text


def test_a_graph_needs_dimensions_for_variable_ones() -> None:
    engine = signature(tensor("A", -1, -1))
    (spec,) = graph_specs({"name": "m", "max_batch_size": 8, "optimization": {"cuda": {"graphs": True, "graph_spec": [
        {"batch_size": 2}]}}})  # fmt: skip
    assert graph_key(spec, engine, engine.profiles[0], batched=True) == (
        "the graph specification has no dimensions for input 'A', which has variable dimensions"
    )


def test_the_smallest_graph_that_covers_a_batch_is_used() -> None:
    keys = [GraphKey((("A", (rows, 4)),), rows, lower) for rows, lower in ((8, 2), (4, 2), (1, 1))]
    found = [best_graph(keys, (("A", (rows, 4)),)) for rows in (1, 2, 3, 4, 5, 8, 9)]
    assert found == [2, 1, 1, 1, 0, 0, None]
    assert best_graph(keys, (("A", (3, 5)),)) is None


# ---- settings -------------------------------------------------------------------------------


def arguments(config: dict[str, Any], **settings: str) -> ModelArguments:
    return ModelArguments({"name": "m", **config}, Path("/models/m"), 1, backend_config=settings)


def test_settings_come_from_parameters_and_the_command_line() -> None:
    config = {
        "parameters": {"execution_context_allocation_strategy": {"string_value": "ON_PROFILE_CHANGE"}},
        "optimization": {"priority": "PRIORITY_MAX"},
    }
    given = arguments(config, plugins="a.so;b.so", **{"version-compatible": "true"})
    assert engine_settings(given) == EngineSettings("ON_PROFILE_CHANGE", "high", True, ("a.so", "b.so"))
    assert engine_settings(arguments({})) == EngineSettings()


def test_an_unknown_allocation_strategy_is_refused() -> None:
    config = {"parameters": {"execution_context_allocation_strategy": {"string_value": "LAZY"}}}
    with pytest.raises(ServingError, match="Supported values are 'STATIC' and 'ON_PROFILE_CHANGE'"):
        engine_settings(arguments(config))


def test_a_plan_outside_the_folder_of_the_model_is_refused() -> None:
    assert plan_file(arguments({}), (9, 0)) == Path("/models/m/1/model.plan")
    assert plan_file(arguments({"cc_model_filenames": {"8.6": "a.plan"}}), (8, 6)) == Path("/models/m/1/a.plan")
    with pytest.raises(ServingError, match="is outside model directory"):
        plan_file(arguments({"default_model_filename": "../../other/model.plan"}), (9, 0))


def test_a_plan_of_another_version_needs_more_than_the_lean_runtime() -> None:
    text = "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match"
    assert "only the lean runtime of TensorRT 11.4" in plan_hint(text, "11.4", (9, 0), lean=True)
    assert "another version of TensorRT" in plan_hint(text, "11.4", (9, 0), lean=False)
    assert plan_hint("Something else", "11.4", (9, 0), lean=False) == ""
