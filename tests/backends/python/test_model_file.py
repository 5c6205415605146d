"""A model that is one function: its annotations are the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.errors import InvalidArgument, ServingError

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

SCALE = """
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Found(NamedTuple):
    scaled: NDArray[np.float32]
    largest: float


def _hidden(x):
    return x


def scale(x: Annotated[NDArray[np.float32], (-1, 2)], factor: float = 2.0) -> Found:
    if factor < 0:
        raise ValueError("factor is negative")
    return Found(x * factor, x.max() * factor)
"""


def completed(lab: Lab, source: str) -> dict[str, Any]:
    lab.write(source, imports=False)
    return lab.backend.complete(lab.arguments(output=[]))


def loaded(lab: Lab, source: str) -> None:
    config = completed(lab, source)
    lab.backend.load(lab.arguments(**config))


def test_arguments_and_results_are_the_configuration(lab: Lab) -> None:
    config = completed(lab, SCALE)
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]},
        {"name": "factor", "data_type": "TYPE_FP64", "dims": [1], "optional": True},
    ]
    assert config["output"] == [
        {"name": "scaled", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "largest", "data_type": "TYPE_FP64", "dims": [1]},
    ]


def test_a_request_is_a_call_and_what_is_left_out_has_its_default(lab: Lab) -> None:
    loaded(lab, SCALE)
    given = np.array([[1, 2], [3, 4]], np.float32)
    found = lab.run({"x": given, "factor": np.array([10.0])})
    assert found.error is None, found.error
    assert found.datatypes == {"scaled": "FP32", "largest": "FP64"}
    assert np.array_equal(found.outputs["scaled"], given * 10)
    assert found.outputs["largest"].tolist() == [40.0]
    assert np.array_equal(lab.run({"x": given}).outputs["scaled"], given * 2)


def test_a_value_error_is_the_clients_and_others_of_the_batch_do_not_fail(lab: Lab) -> None:
    loaded(lab, SCALE)
    given = np.ones((1, 2), np.float32)
    wrong = lab.request({"x": given, "factor": np.array([-1.0])})
    lab.execute(wrong)
    error = lab.response(wrong).error
    assert isinstance(error, InvalidArgument)
    assert error.message.endswith("factor is negative")


@pytest.mark.parametrize(
    ("source", "inputs", "outputs"),
    [
        (
            "def greet(name: str, times: int) -> str:\n    return ' '.join([name] * times)",
            {"name": np.array([b"hey"], object), "times": np.array([2])},
            {"output": [b"hey hey"]},
        ),
        (
            "import numpy as np\nfrom numpy.typing import NDArray\n"
            "def lengths(texts: NDArray[np.str_]) -> tuple[NDArray[np.int64], NDArray[np.str_]]:\n"
            "    return np.char.str_len(texts), np.char.upper(texts)",
            {"texts": np.array(["ä".encode(), b"bc"], object)},
            {"output_0": [1, 2], "output_1": ["Ä".encode(), b"BC"]},
        ),
        (
            "def flip(on: bool, raw: bytes) -> bool:\n    return not on and raw == b'\\xff'",
            {"on": np.array([False]), "raw": np.array([b"\xff"], object)},
            {"output": [True]},
        ),
    ],
    ids=["texts", "arrays of texts", "other types"],
)
def test_datatypes_follow_from_annotations(
    lab: Lab, source: str, inputs: dict[str, Any], outputs: dict[str, list[Any]]
) -> None:
    loaded(lab, source)
    found = lab.run(inputs)
    assert found.error is None, found.error
    assert {name: array.tolist() for name, array in found.outputs.items()} == outputs


def test_several_elements_for_one_value_are_refused(lab: Lab) -> None:
    loaded(lab, "def double(x: int) -> int:\n    return 2 * x")
    found = lab.run({"x": np.array([1, 2])})
    assert found.error.message.endswith("'x' has 2 elements, expected 1")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(x, y: int) -> int: ...", "function 'f' has no annotation for argument 'x'"),
        ("def f(x: int): ...", "function 'f' has no annotation for what it returns"),
        ("def f(x: list) -> int: ...", "argument 'x' of function 'f' has the annotation <class 'list'>, which says no"),
        ("import numpy as np\ndef f(x: np.ndarray) -> int: ...", "expected numpy.typing.NDArray of a type such as"),
        ("def f(x: 'Unknown') -> int: ...", "the annotations of function 'f' cannot be read: name 'Unknown'"),
        ("def f(x: int) -> int: ...\ndef g(x: int) -> int: ...", "has no attribute 'TritonPythonModel'"),
        ("def f(x): ...", "has no attribute 'TritonPythonModel'"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(lab: Lab, source: str, text: str) -> None:
    with pytest.raises(ServingError) as failure:
        completed(lab, source)
    assert text in failure.value.message
