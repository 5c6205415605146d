"""BYTES inputs that are not what their shape says. Texts are Triton's."""

from __future__ import annotations

import pytest

from backends.worker.strings_check import check_strings
from kernel.errors import InvalidArgument
from shm.strings import encode_strings
from shm.tensor import Tensor


def view(data: bytes, *shape: int) -> Tensor:
    return Tensor("IN", "BYTES", list(shape), memoryview(data))


def test_exactly_the_elements_of_the_shape_are_accepted() -> None:
    check_strings(view(encode_strings(["a", "", "bcd", "e"]), 2, 2), "", "m")
    check_strings(view(b"", 0), "", "m")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (encode_strings(["a"]), "expected 2 string elements for inference input 'IN' for model 'm', got 1"),
        (
            encode_strings(["a", "b", "c"]),
            "unexpected number of string elements 3 for inference input 'IN' for model 'm', expecting 2",
        ),
        (
            encode_strings(["a"]) + b"\x01\x00",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 2 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            encode_strings(["a", "b"]) + b"\x01",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 1 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
    ],
)
def test_anything_else_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_strings(view(data, 2), "7", "m")
    assert caught.value.message == f"[request id: 7] {text}"


def test_a_string_that_is_cut_short_is_refused_in_the_words_of_a_backend() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_strings(view(encode_strings(["a"]) + b"\xff\xff\xff\xffb", 2), "7", "m")
    assert caught.value.message == (
        "incomplete string data for inference input 'IN', expecting string of length 4294967295 but only 1 bytes "
        "available"
    )
