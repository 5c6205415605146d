"""An author sees the model's own lines first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from backends.python.author_terminal import describe_for_author
from backends.python.failures import model_code, show_failures
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOURCE = """\
import json


def read(text):
    # this
    # that
    return json.loads(text)


def execute(text):
    try:
        return read(text)
    except ValueError as error:
        raise RuntimeError("no request") from error
"""


def loaded(folder: Path) -> Callable[[str], object]:
    """Return `execute` of a module in `folder`."""
    path = folder / "1" / "model.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    names: dict[str, Callable[[str], object]] = {}
    exec(compile(SOURCE, str(path), "exec"), names)
    return names["execute"]


def test_the_lines_of_the_model_are_before_those_of_libraries(tmp_path: Path) -> None:
    execute = loaded(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        execute("{")
    assert caught.value.__cause__ is not None
    text = describe_for_author(caught.value.__cause__, tmp_path)
    lines = text.splitlines()
    assert lines[0].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert lines[2:9] == [
        "  1/model.py:7 in read",
        "         5 |     # this",
        "         6 |     # that",
        "    >    7 |     return json.loads(text)",
        "  1/model.py:12 in execute",
        "    >   12 |         return read(text)",
        "",
    ]
    assert lines[9] == "  in libraries, called from there:"
    assert json.__file__.rpartition("/")[0] in lines[10]


def test_what_led_to_an_exception_follows_it(tmp_path: Path) -> None:
    execute = loaded(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        execute("{")
    text = describe_for_author(caught.value, tmp_path)
    first, second = text.split("\nwhich was raised because of:\n\n")
    assert first.startswith("RuntimeError: no request\n\n  1/model.py:14 in execute")
    assert second.startswith("json.decoder.JSONDecodeError")


def test_a_file_that_cannot_be_compiled_is_shown_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = (\n", str(tmp_path / "model.py"), "exec")
    text = describe_for_author(caught.value, tmp_path)
    assert "line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed" in text


def test_failures_of_the_models_code_are_shown_before_they_become_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.python.failures._show", None)  # undone at the end
    shown: list[BaseException] = []
    show_failures(shown.append)
    error = ValueError("wrong")
    with pytest.raises(InternalError) as caught, model_code():
        raise error
    assert caught.value.__cause__ is error
    assert shown == [error]
