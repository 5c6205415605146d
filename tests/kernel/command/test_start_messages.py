"""The tables that the server prints at start. In a file, each row is one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backends.registry import known_backends
from kernel import __version__
from kernel.command.start_messages import print_backends_table, print_options_table, print_table
from kernel.options import RepositoryOptions, ServerOptions

if TYPE_CHECKING:
    import pytest


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_backends_are_listed_with_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    print_backends_table(known_backends())
    found = rows(capsys.readouterr().out)
    assert found[0] == ["Backend", "Class"]
    assert ["python", "backends.python.backend:PythonBackend"] in found
    assert found[1:] == sorted(found[1:])


def test_the_options_table_has_triton_s_names(capsys: pytest.CaptureFixture[str]) -> None:
    paths = (Path("/models/a"), Path("/models/b"))
    repository = RepositoryOptions(paths, control_mode="explicit", load_models=("m",), auto_complete_config=False)
    print_options_table(ServerOptions(repository, server_id="id [bold]"))
    found = dict(rows(capsys.readouterr().out))
    assert found["server_id"] == "id [bold]"
    assert found["server_version"] == __version__
    assert (found["model_repository_path[0]"], found["model_repository_path[1]"]) == ("/models/a", "/models/b")
    assert found["model_control_mode"] == "MODE_EXPLICIT"
    assert found["startup_models_0"] == "m"
    assert found["strict_model_config"] == "1"
    assert found["exit_timeout"] == "30"


def test_what_models_say_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("Model", "Status"), [("m", "UNAVAILABLE: \x1b]0;owned\x07\x1b[2J\x9b boom")])
    assert rows(capsys.readouterr().out)[1] == ["m", r"UNAVAILABLE: \u001b]0;owned\u0007\u001b[2J\u009b boom"]
