"""The inputs of a load: random ones, zeros, and those of files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.tools.bench.inputs import InputShapes, file_values, generated_values
from kernel.tools.bench.requests import BenchInput
from kernel.tools.bench.target import FoundOutput, wrong_response
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from pathlib import Path


def shapes(
    *inputs: tuple[str, str, list[int]], config: dict[str, Any] | None = None, batch: int = 1, **given: list[int]
) -> InputShapes:
    metadata = {"inputs": [{"name": name, "datatype": datatype, "shape": dims} for name, datatype, dims in inputs]}
    return InputShapes(metadata, config, given, batch)


BATCHED = {"max_batch_size": 8}


def test_random_values_have_the_batch_and_the_given_shape() -> None:
    [[found]] = generated_values(shapes(("IN", "FP32", [-1, -1, 3]), config=BATCHED, batch=4, IN=[5, 3]), "random")
    assert found.shape == [4, 5, 3]
    values = np.frombuffer(found.raw, np.float32)
    assert values.size == 60
    assert 0 <= values.min() < values.max() < 1


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64"])
def test_every_datatype_can_be_generated_in_any_size(datatype: str) -> None:
    for kind in ("random", "zero"):
        [[found]] = generated_values(shapes(("IN", datatype, [100_003])), kind)
        assert len(found.raw) % 100_003 == 0
        assert any(found.raw) == (kind == "random")


def test_texts_are_generated_with_their_lengths() -> None:
    [[found]] = generated_values(shapes(("IN", "BYTES", [3])), "random")
    assert len(found.raw) == 3 * 20


def test_optional_inputs_are_left_out_and_guessed_dimensions_are_told() -> None:
    config = {"max_batch_size": 0, "input": [{"name": "B", "optional": True}]}
    given = shapes(("A", "FP32", [-1, 2]), ("B", "FP32", [1]), config=config)
    [found] = generated_values(given, "zero")
    assert [(each.name, each.shape) for each in found] == [("A", [1, 2])]
    assert given.guessed == ["A [-1, 2]"]


def test_a_wrong_shape_or_batch_is_refused() -> None:
    with pytest.raises(ClientError, match="takes batches of up to 8"):
        shapes(("A", "FP32", [-1, 2]), config=BATCHED, batch=9)
    with pytest.raises(ClientError, match="takes no batches"):
        shapes(("A", "FP32", [2]), config={"max_batch_size": 0}, batch=2)
    with pytest.raises(ClientError, match="no input 'B'"):
        shapes(("A", "FP32", [2]), B=[1])
    with pytest.raises(ClientError, match=r"has shape \[2\]"):
        generated_values(shapes(("A", "FP32", [2]), A=[3]), "zero")


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_files_of_perf_analyzer_have_one_request_for_each_entry(tmp_path: Path) -> None:
    document = {"data": [{"A": [1, 2]}, [{"A": {"content": [3, 4], "shape": [2]}}, {"A": {"b64": "BQAAAAYAAAA="}}]]}
    path = write(tmp_path / "data.json", document)
    found = file_values(shapes(("A", "INT32", [-1, 2]), config=BATCHED, batch=1), path)
    assert [np.frombuffer(each.raw, np.int32).tolist() for [each] in found] == [[1, 2], [3, 4], [5, 6]]
    assert all(each.shape == [1, 2] for [each] in found)


def test_rows_of_a_batch_repeat_the_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "data.json", {"data": [{"A": ["x", "y"]}]})
    [[found]] = file_values(shapes(("A", "BYTES", [-1, 2]), config=BATCHED, batch=3), path)
    assert (found.shape, len(found.raw)) == ([3, 2], 3 * 10)


def test_the_body_of_a_request_is_a_file_too(tmp_path: Path) -> None:
    tensor = {"name": "A", "shape": [2, 1], "datatype": "FP32", "data": [1.5, 2.5]}
    [[found]] = file_values(
        shapes(("A", "FP32", [-1, 1]), config=BATCHED, batch=2), write(tmp_path / "r", {"inputs": [tensor]})
    )
    assert (found.shape, np.frombuffer(found.raw, np.float32).tolist()) == ([2, 1], [1.5, 2.5])


def test_numpy_files_and_folders(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2]], np.float32))
    np.savez(tmp_path / "a.npz", A=np.array([[1, 2]], np.float32))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "A").write_bytes(np.array([[1, 2]], np.float32).tobytes())
    model = shapes(("A", "FP32", [-1, 2]), config=BATCHED)
    expected = [[BenchInput("A", "FP32", [1, 2], np.array([1, 2], np.float32).tobytes())]]
    assert [file_values(model, tmp_path / each) for each in ("a.npy", "a.npz", "folder")] == [expected] * 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot read"),
        ("[]", 'neither "data"'),
        ('{"data": []}', "has no request"),
        ('{"data": [{"B": [1]}]}', "has 'B', and the model takes A"),
        ('{"data": [{}]}', "input 'A' is not in"),
        ('{"data": [{"A": [1, 2, 3]}]}', "has 3 elements, and shape"),
        ('{"data": [{"A": ["x", 1]}]}', "is not a whole number"),
        ('{"data": [{"A": {"b64": "AAAA"}}]}', "has 3 bytes"),
        ('{"data": [1]}', "each entry"),
        ('{"data": [{"A": {"content": [1, 2], "shape": 2}}]}', "no list of sizes"),
        ('{"data": [{"A": {"content": [1, 2], "shape": ["2"]}}]}', "no list of sizes"),
        ('{"data": [{"A": {"b64": 5}}]}', "is neither a list nor"),
        ('{"data": %s}' % ("[" * 100_000 + "]" * 100_000), "nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_files_are_explained(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(ClientError, match=words):
        file_values(shapes(("A", "INT32", [2])), tmp_path / "data.json")


def test_a_file_that_is_not_there_or_another_datatype_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="No such file"):
        file_values(shapes(("A", "INT32", [2])), tmp_path / "none.json")
    np.save(tmp_path / "a.npy", np.array([1, 2], np.float64))
    with pytest.raises(ClientError, match="is INT32, and the array is float64"):
        file_values(shapes(("A", "INT32", [2])), tmp_path / "a.npy")


def test_numpy_files_with_another_content_are_explained(tmp_path: Path) -> None:
    model = shapes(("A", "INT32", [2]))
    np.savez(tmp_path / "a.npz", A=np.array([1, 2], np.int32))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ClientError, match="is not what its ending .npy says"):
        file_values(model, tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.array([1, 2], np.int32))
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(ClientError, match="is not what its ending .npz says"):
        file_values(model, tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npy").read_bytes()[:50])
    with pytest.raises(ClientError, match="cannot read"):
        file_values(model, tmp_path / "c.npz")


def test_a_datatype_that_no_server_of_this_kind_has_is_refused() -> None:
    with pytest.raises(ClientError, match="does not know the datatype 'STRING'"):
        shapes(("A", "STRING", [2]))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (FoundOutput("OUT", "FP32", [1, 2], 8), ""),
        (FoundOutput("OUT", "", []), ""),
        (FoundOutput("OTHER", "FP32", [1, 2], 8), "the model has OUT"),
        (FoundOutput("OUT", "INT32", [1, 2], 8), "is INT32, and not FP32"),
        (FoundOutput("OUT", "FP32", [2], 8), "has shape [2]"),
        (FoundOutput("OUT", "FP32", [1, 3], 12), "has shape [1, 3]"),
        (FoundOutput("OUT", "FP32", [1, 2], 4), "has 4 bytes"),
    ],
)
def test_the_first_response_is_compared_with_the_metadata(output: FoundOutput, words: str) -> None:
    metadata = {"outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 2]}]}
    found = wrong_response([output], metadata)
    assert words in found
    assert bool(words) == bool(found)
    assert wrong_response([], metadata) == "it has no outputs"
    assert wrong_response([output], {"outputs": []}) == ""  # the server does not describe its outputs


def test_a_server_may_leave_dimensions_of_one_out_of_a_row() -> None:
    metadata = {"outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 1, 3, 1]}]}
    for shape in ([5, 3], [5, 1, 3, 1]):
        assert wrong_response([FoundOutput("OUT", "FP32", shape, 60)], metadata) == ""
    assert "has shape [5, 3, 1]" in wrong_response([FoundOutput("OUT", "FP32", [5, 3, 1], 60)], metadata)
