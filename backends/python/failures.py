"""Errors of a model's own code: Triton's texts, with the model's stack frames.

All code of a model runs inside `model_code`, which turns its exceptions into `InternalError`.
"""

from __future__ import annotations

import contextlib
import traceback
from asyncio import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Stack frames of these files belong to the server, not to the model.
_OURS = (str(Path(__file__).parent.parent) + "/", "<frozen importlib")


#: Triton's text for a value that C++ cannot hold.
NO_CAST = (
    "Unable to cast Python instance to C++ type (#define PYBIND11_DETAILED_ERROR_MESSAGES or compile in debug mode for "
    "details)"
)

#: Shows exceptions of the model's code to its author, where that is on the other side of a terminal.
_show: Callable[[BaseException], None] | None = None


def show_failures(show: Callable[[BaseException], None]) -> None:
    """Call `show` with each exception of the model's code from now on, before it becomes an error."""
    global _show
    _show = show


class TritonModelException(Exception):
    """A model has used a `pb_utils` function or class wrongly."""


def describe(error: BaseException) -> str:
    """Return `<type>: <message>`, followed by the model's stack frames, the innermost first."""
    text = f"{type(error).__name__}: {str(error) or '<EMPTY MESSAGE>'}"
    frames = [
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_OURS)
    ]
    if isinstance(error, SyntaxError) and error.filename and error.text:  # the file that could not be compiled
        frames.append(f"  {error.filename}({error.lineno}): {error.text.strip()}\n")
    return f"{text}\n\nAt:\n{''.join(reversed(frames))}" if frames else text


@contextlib.contextmanager
def model_code(prefix: str = "") -> Iterator[None]:
    """Raise exceptions of the model's code in this block as `InternalError`, with `prefix` before the description.

    This includes `SystemExit` and whatever else is no `Exception`: as in Triton, `sys.exit` in a model fails its
    requests, and so does a panic of a library in Rust (`pyo3_runtime.PanicException`). `__cause__` is the model's
    exception. What ends a coroutine of the model is raised as it is.
    """
    try:
        yield
    except (ServingError, CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise model_failure(error, prefix) from error


def model_failure(error: BaseException, prefix: str) -> InternalError:
    """Return the error for an exception of the model's code, which is shown to the model's author."""
    if _show is not None:
        _show(error)
    return InternalError(prefix + describe(error))


def without_tracebacks(error: ServingError) -> ServingError:
    """Return `error` without its traceback and its causes' tracebacks, which refer to the inputs of requests.

    Since Python 3.12 the traceback of a cause also refers to the frame of `model_code`, and that to the cause: without
    this, only the garbage collector would free the inputs.
    """
    for cause in (error.__cause__, error.__context__):
        if cause is not None:
            cause.__traceback__ = None
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def incompatible_arguments(call: str, signature: str, *arguments: object) -> TypeError:
    """Return the error of a call with arguments of wrong types, with the text of Triton's binding."""
    kind = "constructor" if call == "__init__" else "function"
    invoked = ", ".join(map(repr, arguments))
    return TypeError(
        f"{call}(): incompatible {kind} arguments. The following argument types are supported:\n"
        f"    1. {signature}\n\nInvoked with: {invoked}"
    )


def is_truth(value: object) -> bool:
    """Whether Triton's binding takes `value` for an argument that is True or False."""
    return value is not None and hasattr(type(value), "__bool__")


def check_parameters(parameters: object) -> dict[str, str | int | bool]:
    """Return a copy of a model's `parameters`. Raises `TritonModelException` for types that Triton refuses."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


def wrong_return(returned: object, count: int) -> str:
    """Return the reason why `returned`, the result of `execute`, is wrong; it should be a list of `count` elements."""
    if not isinstance(returned, list):
        return f"Expected a list in the execute return, found type '{type(returned)}'."
    return (
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}\n"
    )
