"""Hints for model repositories that are none."""

from __future__ import annotations

import pytest

from kernel.repository.layout import Entry
from kernel.repository.path_hints import name_hint, path_hint, repository_hint


def folder(name: str, *children: Entry) -> Entry:
    return Entry(name, is_folder=True, children=children)


MODEL = folder("plus", folder("1", Entry("model.onnx")))
VERSION = folder("1", Entry("model.onnx"))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("s3:/bucket/models", "an address in a cloud has two slashes, 's3://bucket/models': give it as text"),
        ("GS:/bucket", "the addresses of repositories begin with s3://, gs://, as://; copy models from elsewhere"),
        ("hdfs:/host/models", "the addresses of repositories begin with s3://, gs://, as://"),
        ("/srv/modles", "did you mean '/srv/models'?"),
        ("modles", "did you mean 'models'?"),
        ("/srv/elsewhere", ""),
    ],
)
def test_a_path_that_is_no_folder(path: str, hint: str) -> None:
    found = path_hint(path, is_file=False, siblings=["models", "data"])
    assert found.startswith(hint)
    assert bool(found) == bool(hint)


def test_a_file_that_is_not_there() -> None:
    assert path_hint("net/irs.onnx", is_file=False, siblings=["iris.onnx"]) == "did you mean 'net/iris.onnx'?"
    assert path_hint("gone.onnx", is_file=False, siblings=["iris.onnx"]) == "there is no such file either"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("models/plus/config.pbtxt", "the folder above 'models/plus'"),
        ("model.py", "in which this one is at NAME/1/model.py"),
        ("net.pt", "in which this one is at NAME/1/model.pt"),
        ("net.bin", "or a model whose name ends with .onnx, .py or .plan"),
    ],
)
def test_a_path_that_is_a_file(path: str, hint: str) -> None:
    assert hint in path_hint(path, is_file=True)


def test_the_folder_of_a_model_is_recognised_by_its_configuration_or_by_its_file() -> None:
    hint = "'/srv/plus' is the folder of one model: give the folder above it as the repository, '/srv'"
    assert repository_hint("/srv/plus", [Entry("config.pbtxt"), folder("1")]) == hint
    assert repository_hint("/srv/plus/", [VERSION]) == hint.replace("'/srv/plus'", "'/srv/plus/'")


def test_a_repository_with_models_has_no_hint_whatever_else_is_in_it() -> None:
    assert repository_hint("/srv", [MODEL, Entry("README.md"), Entry("other.onnx")]) == ""
    assert repository_hint("/srv", [folder("1"), folder("plus"), Entry("config.pbtxt")]) == ""
    assert repository_hint("/srv", [folder("2024")]) == ""


def test_a_repository_without_folders_says_where_files_belong() -> None:
    assert "'naiad run /srv/plus.onnx', or put it at '/srv/plus/1/model.onnx'" in repository_hint(
        "/srv", [Entry("plus.onnx")]
    )
    assert "config.pbtxt and no folders" in repository_hint("/srv", [Entry("config.pbtxt")])
    assert "has no models" in repository_hint("/srv", [])
    assert "has no models" in repository_hint("/srv", [folder(".git")])


def test_a_name_that_no_model_has() -> None:
    assert name_hint("plsu", ["plus", "minus"]) == "did you mean 'plus'?"
    assert name_hint("x", ["b", "a"]) == "the repositories have 'a', 'b'"
    assert name_hint("x", list("abcdefg")) == "the repositories have 'a', 'b', 'c', 'd', 'e' and more"
    assert name_hint("x", []) == "the repositories have no models"
