"""What clients read of an error: cut where it repeats what they sent, and without control characters."""

from __future__ import annotations

import errno
import logging

import pytest

from kernel.errors import (
    MAX_MODEL_TEXT,
    BadConfig,
    ErrorCode,
    InternalError,
    ModelLoadFailed,
    ModelNotFound,
    NoDescriptorLeft,
    ServingError,
    Unavailable,
    failing_as,
    failure_logged,
    file_error,
    lacks_descriptors,
    worker_error,
)
from tests.own_records import own_records


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


def test_code_of_others_fails_with_the_error_that_is_made_of_what_it_raises() -> None:
    cause = KeyError("a")
    with (
        pytest.raises(InternalError, match="it failed: KeyError") as caught,
        failing_as(lambda error: InternalError(f"it failed: {type(error).__name__}")),
    ):
        raise cause
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("raised", [BadConfig("as it is"), KeyboardInterrupt("as it is")])
def test_an_error_that_passes_goes_on_as_it_is(raised: BaseException) -> None:
    with (
        pytest.raises(type(raised), match="as it is") as caught,
        failing_as(lambda error: InternalError("changed"), passes=ServingError),
    ):
        raise raised
    assert caught.value is raised


def test_a_step_that_fails_is_logged_where_it_stands_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    for number in (1, 2):
        with failure_logged(logging.getLogger("some"), "step %d has failed", number):
            if number == 1:
                raise ValueError("why")
            done.append(number)
    [record] = own_records(caplog)
    assert (done, record.getMessage(), record.levelname) == ([2], "step 1 has failed", "ERROR")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    assert record.pathname == __file__


def test_an_interrupt_ends_all_steps() -> None:
    with pytest.raises(KeyboardInterrupt), failure_logged(logging.getLogger("some"), "a step has failed"):
        raise KeyboardInterrupt


def test_other_errors_of_files_keep_their_text() -> None:
    error = file_error("the file cannot be read", OSError(errno.ENOENT, "No such file"))
    assert (type(error), error.message) == (InternalError, "the file cannot be read")
    assert not lacks_descriptors(ValueError())
