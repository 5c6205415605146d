"""What clients and operators read when a model's own code raises: Triton's text with the model's frames.

`reported` is the one boundary between the backend and a model's code: what the model raises leaves it
as an `InternalError`.
"""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Frames of these files are the server's, not the model's.
_OURS = (str(Path(__file__).parent.parent) + "/", "<frozen importlib")


class TritonModelException(Exception):
    """Raised by this module's functions when a model uses them wrongly."""


def describe(error: BaseException) -> str:
    """Return `<type>: <message>`, and the model's frames below it, the innermost first."""
    text = f"{type(error).__name__}: {str(error) or '<EMPTY MESSAGE>'}"
    frames = [
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_OURS)
    ]
    return f"{text}\n\nAt:\n{''.join(reversed(frames))}" if frames else text


@contextlib.contextmanager
def reported(prefix: str = "") -> Iterator[None]:
    """Turn what the model's code raises inside into an `InternalError`: `prefix` and what was raised.

    `SystemExit` counts too: a model that calls `sys.exit` fails its requests, as in Triton. The error's
    `__cause__` is what was raised.
    """
    try:
        yield
    except ServingError:
        raise
    except (Exception, SystemExit) as error:
        raise InternalError(prefix + describe(error)) from error


def incompatible(call: str, signature: str, *arguments: object) -> TypeError:
    """Return the error of a call with arguments of wrong types, in the words of Triton's binding."""
    kind = "constructor" if call == "__init__" else "function"
    invoked = ", ".join(map(repr, arguments))
    return TypeError(
        f"{call}(): incompatible {kind} arguments. The following argument types are supported:\n"
        f"    1. {signature}\n\nInvoked with: {invoked}"
    )


def check_parameters(parameters: object) -> dict[str, str | int | bool]:
    """Return a copy of a model's `parameters`; `TritonModelException` for types that Triton refuses."""
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
