"""The file MLmodel: what it says, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from backends.mlflow.model_folder import parse_mlmodel
from backends.mlflow.signature import Column, ModelSignature, Schema, SignatureTensor
from kernel.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from tests.backends.mlflow.conftest import COLUMNS, LABEL, TENSOR, mlmodel

if TYPE_CHECKING:
    from tests.backends.mlflow.conftest import MlflowFolder


def test_flavour_file_method_and_signature_are_read() -> None:
    text = mlmodel("sklearn", {"pickled_model": "model.skops"}, COLUMNS[:1], LABEL, predict_fn="predict_proba")
    found = parse_mlmodel(text, "m")
    assert (found.flavour, found.filename, found.method) == ("sklearn", "model.skops", "predict_proba")
    assert found.signature == ModelSignature(
        Schema(columns=(Column("a", "a", "double", True),)),
        Schema(tensors=(SignatureTensor("output-0", "INT64", (-1,)),)),
    )


def test_a_folder_without_signature_and_of_the_oldest_form_is_read() -> None:
    found = parse_mlmodel("flavors:\n  xgboost:\n    xgb_version: 1.0.0\n", "m")
    assert (found.flavour, found.filename, found.method) == ("xgboost", "model.xgb", "predict")
    assert found.signature == ModelSignature()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"type": "long"}, Column("input-0", 0, "long", True)),
        ({"type": "string", "name": 7, "required": False}, Column("7", 7, "string", False)),
        ({"type": "boolean", "name": "x", "optional": True}, Column("x", "x", "boolean", False)),
    ],
)
def test_columns_keep_their_labels(entry: dict[str, Any], expected: Column) -> None:
    assert parse_mlmodel(mlmodel("sklearn", {}, [entry]), "m").signature.inputs.columns == (expected,)


@pytest.mark.parametrize(
    ("dtype", "datatype"), [("float32", "FP32"), ("bool", "BOOL"), ("uint8", "UINT8"), ("object", "BYTES"),
                            ("<U5", "BYTES"), ("str", "BYTES")]
)  # fmt: skip
def test_tensors_have_datatypes_by_their_dtype(dtype: str, datatype: str) -> None:
    entry = {"type": "tensor", "name": "x", "tensor-spec": {"dtype": dtype, "shape": [-1, 2, 3]}}
    found = parse_mlmodel(mlmodel("sklearn", {}, [entry]), "m").signature.inputs.tensors
    assert found == (SignatureTensor("x", datatype, (-1, 2, 3), True),)


@pytest.mark.parametrize(
    ("flavour", "module"),
    [("tensorflow", "mlflow.tensorflow"), ("python_model", "mlflow.pyfunc.model"), ("sklearn", "my.loader")],
)
def test_what_has_no_reader_here_is_left_to_mlflow(flavour: str, module: str) -> None:
    found = parse_mlmodel(mlmodel(flavour, {}, loader_module=module), "m")
    assert (found.flavour, found.filename, found.fields["loader_module"]) == ("python_function", "", module)


def test_a_folder_that_mlflow_cannot_load_either_is_refused_with_what_is_supported() -> None:
    with pytest.raises(Unsupported) as failure:
        parse_mlmodel("flavors: {spacy: {data: x}, python_function: {}}", "m")
    assert "has the MLflow flavours spacy, python_function and is not supported" in failure.value.message
    assert "supported are the flavours lightgbm, onnx, pytorch, sklearn, xgboost" in failure.value.message


#: The anchor `l` is a list of millions of elements.
MANY = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdefgh", "bcdefghl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flavors: [", "cannot be read as YAML"),
        ("- a\n", "no mapping 'flavors'"),
        ("", "no mapping 'flavors'"),
        ("flavors: {sklearn: 1}", "no mapping 'flavors'"),
        ("flavors: {sklearn: {}}\nsignature: [1]", "signature of model 'm' is a list"),
        ("a: !!python/object/apply:os.mkdir [x]", "cannot be read as YAML"),
        ("[" * 5000, "cannot be read as YAML"),
        # A few lines that are millions of elements: they are not shown, and not merged.
        (f"{MANY}flavors: {{sklearn: {{pickled_model: *l}}}}", "'pickled_model' in .* is a list; expected a text$"),
        (f"{MANY}flavors: {{sklearn: {{model_class: *l}}}}", "'model_class' in .* is a list; expected a text$"),
        (f"{MANY}flavors: {{python_function: {{loader_module: *l}}}}", "'loader_module' in .* is a list; expected"),
        (f"{MANY}flavors: {{sklearn: {{}}, python_function: {{predict_fn: *l}}}}", "'predict_fn' in .* is a list"),
        ("a: &a {k: 1}\nflavors: {sklearn: {<<: *a}}", "cannot be read as YAML: merged mappings .* are refused$"),
    ],
)
def test_a_broken_file_is_refused(text: str, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        parse_mlmodel(text, "m")


@pytest.mark.parametrize("name", ["../other/model.pkl", "/etc/passwd", "a/../../b"])
def test_a_model_file_outside_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="expected a path in the folder"):
        parse_mlmodel(mlmodel("sklearn", {"pickled_model": name}), "m")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([*COLUMNS, *TENSOR], "are columns and tensors"),
        ([{"type": "array", "name": "a"}], "input 0 in the signature of model 'm' is of the type 'array'"),
        ([{"type": "double", "name": ["a"]}], "expected a text or a number"),
        ([{"type": "tensor"}], "is no tensor with a dtype and a shape"),
        ([{"type": "tensor", "tensor-spec": {"dtype": "float65", "shape": [-1]}}], "is no tensor with a dtype"),
        ([{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-2]}}], "a dimension is -1 or a size"),
        ([{"type": "tensor", "tensor-spec": {"dtype": "complex64", "shape": [-1]}}], "of the type 'complex64'"),
        ({"a": 1}, "are no list of JSON"),
    ],
)
def test_a_wrong_signature_is_refused_with_the_input_that_is_wrong(inputs: Any, expected: str) -> None:
    with pytest.raises(ServingError) as failure:
        parse_mlmodel(mlmodel("sklearn", {}, inputs), "m")
    assert expected in failure.value.message


def test_params_in_a_signature_are_refused_where_mlflow_does_not_ignore_them() -> None:
    params = f"params: '{json.dumps([{'name': 'x'}])}'"
    assert parse_mlmodel(mlmodel("sklearn", {}, COLUMNS).replace("params: null", params), "m").signature.has_params
    with pytest.raises(Unsupported, match="has params, which requests cannot give here"):
        parse_mlmodel(mlmodel("xgboost", {}, COLUMNS).replace("params: null", params), "m")


def test_a_folder_without_the_file_says_what_is_expected(folder: MlflowFolder) -> None:
    with pytest.raises(Unavailable, match="MLmodel' for model 'm': No such file.*what mlflow's save_model has written"):
        folder.loaded()
    folder.write("sklearn", {"pickled_model": "model.skops"})
    with pytest.raises(Unavailable, match="model.skops' for model 'm', which its file MLmodel names"):
        folder.loaded()
    (folder.version / "MLmodel").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="is not UTF-8"):
        folder.loaded()
    (folder.version / "MLmodel").write_bytes(b"#" * (5 << 20))
    with pytest.raises(InvalidArgument, match="has more than 4194304 bytes"):
        folder.loaded()
