"""The requests of a model's warm-up. The texts were compared with those of a Triton 2.51.0 server."""

from __future__ import annotations

import random

import pytest

from kernel.config.autofill import fill_backend, normalise
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_pbtxt
from kernel.config.spec import model_spec
from kernel.errors import InvalidArgument
from kernel.repository.warmup import MAX_BYTE_SIZE, WarmupSample, warmup_files, warmup_samples
from kernel.testing import RecordingSink

MODEL = """
backend: "python"
max_batch_size: %d
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }, { name: "OPT" data_type: %s dims: [2] optional: true }]
model_warmup [%s]
"""


def samples(
    *settings: str, files: dict[str, bytes] | None = None, max_batch_size: int = 4, opt: str = "TYPE_FP32"
) -> list[WarmupSample]:
    text = MODEL % (max_batch_size, opt, ", ".join(f"{{ {setting} }}" for setting in settings))
    config = from_pbtxt(text.encode(), "config.pbtxt")
    fill_backend(config, "m", {"model.py": False})
    normalise(config, NO_GPUS)
    return warmup_samples(config, model_spec(config), files or {}, random.Random(7))


def given(data: str, dims: str = "[3]", name: str = "IN", data_type: str = "TYPE_INT32") -> str:
    return f'inputs {{ key: "{name}" value {{ data_type: {data_type} dims: {dims} {data} }} }}'


def failure(*settings: str, files: dict[str, bytes] | None = None) -> str:
    with pytest.raises(InvalidArgument) as caught:
        samples(*settings, files=files)
    return caught.value.message


def test_a_zero_input_has_the_configured_shape_after_a_batch_dimension_of_one() -> None:
    [sample] = samples('name: "z" batch_size: 2 count: 3 ' + given("zero_data: true"))
    assert (sample.name, sample.batch_size, sample.count) == ("z", 2, 3)
    [tensor] = sample.inputs
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.data) == ("IN", "INT32", [1, 3], bytes(12))
    [unbatched] = samples("batch_size: 1 " + given("zero_data: true"), max_batch_size=0)
    assert unbatched.inputs[0].shape == [3]


def test_a_sample_runs_once_by_default_and_never_with_batch_size_zero() -> None:
    [sample] = samples("batch_size: 1 " + given("zero_data: true"), "batch_size: 0 " + given(""))
    assert sample.count == 1


def test_random_inputs_have_random_bytes_empty_strings_or_valid_booleans() -> None:
    [sample] = samples("batch_size: 1 " + given("random_data: true"))
    assert sample.inputs[0].data == random.Random(7).randbytes(12)
    [strings] = samples(
        "batch_size: 1 " + given("zero_data: true") + given("random_data: true", "[2]", "OPT", "TYPE_STRING"),
        opt="TYPE_STRING",
    )
    assert strings.inputs[1].data == bytes(8)
    [booleans] = samples(
        "batch_size: 1 " + given("zero_data: true") + given("random_data: true", "[2]", "OPT", "TYPE_BOOL"),
        opt="TYPE_BOOL",
    )
    assert booleans.inputs[1].data is not None
    assert set(bytes(booleans.inputs[1].data)) <= {0, 1}


def test_a_file_is_cut_to_the_input_size_unless_the_input_has_strings() -> None:
    [sample] = samples("batch_size: 1 " + given('input_data_file: "raw"'), files={"raw": bytes(range(20))})
    assert sample.inputs[0].data == bytes(range(12))
    strings = b"\1\0\0\0a\2\0\0\0bc"
    [sample] = samples(
        "batch_size: 1 " + given("zero_data: true") + given('input_data_file: "s"', "[2]", "OPT", "TYPE_STRING"),
        files={"s": strings},
        opt="TYPE_STRING",
    )
    assert sample.inputs[1].data == strings


def test_inputs_that_the_configuration_does_not_declare_are_not_checked() -> None:
    [sample] = samples("batch_size: 1 " + given("zero_data: true") + given("zero_data: true", "[1]", "START"))
    assert [tensor.name for tensor in sample.inputs] == ["IN", "START"]


def test_only_the_files_of_samples_that_run_are_read() -> None:
    text = MODEL % (
        4,
        "TYPE_FP32",
        "{ batch_size: 1 " + given('input_data_file: "b"') + given('input_data_file: "a"', name="OPT") + "},"
        "{ batch_size: 0 " + given('input_data_file: "c"') + "}, { batch_size: 1 " + given("zero_data: true") + "}",
    )
    assert warmup_files(from_pbtxt(text.encode(), "config.pbtxt")) == ["a", "b"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            given("zero_data: true", "[-1]"),
            "warmup setting expects all variable-size dimensions are specified for input 'IN'",
        ),
        (given(""), "[request id: <id_unknown>] warmup setting expects input 'IN' to have input_data_type set"),
        (
            given('input_data_file: "raw"'),
            (
                "[request id: <id_unknown>] warmup setting expects 12 bytes, but the data provided from rawonly has "
                "4 bytes"
            ),
        ),
        (
            given("zero_data: true", data_type="TYPE_FP32"),
            "[request id: <id_unknown>] inference input 'IN' data-type is 'FP32', but model 'm' expects 'INT32' "
            "(in warmup sample '')",
        ),
        (
            given("zero_data: true", data_type="TYPE_INVALID"),
            "[request id: <id_unknown>] inference input 'IN' data-type is '<invalid>', but model 'm' expects 'INT32' "
            "(in warmup sample '')",
        ),
    ],
)
def test_a_wrong_sample_is_refused(setting: str, message: str) -> None:
    assert failure("batch_size: 1 " + setting, files={"raw": bytes(4)}) == message


def test_a_missing_input_and_a_wrong_shape_have_the_same_errors_as_in_requests() -> None:
    assert failure("batch_size: 1").startswith("[request id: <id_unknown>] expected number of inputs between 1 and 2")
    assert failure("batch_size: 1 " + given("zero_data: true", "[1, 1]")).startswith(
        "[request id: <id_unknown>] unexpected shape for input 'IN' for model 'm'. Expected [-1,-1], got [1,1,1]."
    )


def test_the_error_of_a_misspelt_input_names_the_sample_the_name_and_those_of_the_model() -> None:
    text = failure(
        'name: "cold" batch_size: 1 ' + given("zero_data: true", name="In") + given("zero_data: true", name="X")
    )
    assert text.startswith("[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 0 inputs for")
    assert text.endswith(" (in warmup sample 'cold', which has 'In', 'X'; the inputs of the model are 'IN', 'OPT')")


def test_samples_that_exceed_the_limits_are_refused() -> None:
    assert "at most" in failure("batch_size: 1 " + given("zero_data: true", f"[{MAX_BYTE_SIZE}]"))
    assert "at most" in failure("batch_size: 1 " + given("random_data: true", "[4611686018427387904, 4]"))
    assert "1000000 requests" in failure('name: "s" batch_size: 1000000 ' + given("zero_data: true"))


def test_the_requests_of_a_sample_share_bytes_but_no_tensor_objects() -> None:
    [sample] = samples("batch_size: 2 " + given("zero_data: true"))
    one, other = sample.request("m", RecordingSink()), sample.request("m", RecordingSink())
    assert one.inputs[0] == other.inputs[0]
    assert one.inputs[0] is not other.inputs[0]
    assert one.streaming, "a decoupled model could not respond"


def test_the_error_of_a_sample_contains_all_errors_of_the_run() -> None:
    [sample] = samples('name: "s" batch_size: 1 ' + given("zero_data: true"))
    assert sample.failed(["boom", "bang"]).message == "failed to run warmup sample 's': boom; bang; "
