"""What clients read of an error: cut where it repeats what they sent, and without control characters."""

from __future__ import annotations

import errno

import pytest

from kernel.errors import (
    MAX_MODEL_TEXT,
    ErrorCode,
    InternalError,
    ModelLoadFailed,
    ModelNotFound,
    NoDescriptorLeft,
    ServingError,
    Unavailable,
    file_error,
    lacks_descriptors,
    worker_error,
)


def test_an_error_of_ordinary_length_is_sent_as_it_is() -> None:
    error = ModelNotFound("m" * 900)
    assert error.text == error.message


@pytest.mark.parametrize("name", ["x" * 100_000, "é" * 100_000, "\x1b" * 100_000])
def test_what_a_client_sent_is_repeated_up_to_a_kibibyte(name: str) -> None:
    error = ModelNotFound(name)
    cut = error.text.replace("\\u001b", "\x1b")
    assert len(cut.encode()) < 1100
    assert cut.endswith("' is not found")
    assert f"({len(error.message.encode())} bytes)" in cut


@pytest.mark.parametrize("make", [lambda text: worker_error(ErrorCode.INTERNAL, text), ModelLoadFailed])
def test_texts_of_models_may_be_longer(make: type[ServingError]) -> None:
    traceback = "  File model.py\n" * 1000
    assert make(traceback).text == traceback
    assert len(make("x" * 10**6).text) < MAX_MODEL_TEXT + 30


def test_line_feeds_and_tabs_are_the_only_control_characters() -> None:
    assert InternalError("a\n\tb\x1b[31m\u2028").text == "a\n\tb\\u001b[31m\\u2028"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_the_server_is_unavailable(number: int) -> None:
    cause = OSError(number, "Too many open files")
    assert lacks_descriptors(cause)
    error = file_error("the file cannot be read", cause)
    assert isinstance(error, NoDescriptorLeft)
    assert error.code is Unavailable.code


def test_other_errors_of_files_keep_their_text() -> None:
    error = file_error("the file cannot be read", OSError(errno.ENOENT, "No such file"))
    assert (type(error), error.message) == (InternalError, "the file cannot be read")
    assert not lacks_descriptors(ValueError())
