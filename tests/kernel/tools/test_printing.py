"""The tables that the server prints at start. In a file, each row is one line."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from backends.registry import known_backends
from kernel.options import RepositoryOptions, ServerOptions
from kernel.tools import printing
from kernel.tools.printing import backends_table, demo_hint, options_table, program, server_url, table_text
from kernel.version import __version__


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_backends_are_listed_with_their_classes() -> None:
    found = rows(backends_table(known_backends()))
    assert found[0] == ["Backend", "Class"]
    assert ["python", "backends.python.backend:PythonBackend"] in found
    assert found[1:] == sorted(found[1:])


def test_the_options_table_has_triton_s_names() -> None:
    paths = (Path("/models/a"), Path("/models/b"))
    repository = RepositoryOptions(paths, control_mode="explicit", load_models=("m",), auto_complete_config=False)
    found = dict(rows(options_table(ServerOptions(repository, server_id="id [bold]"))))
    assert found["server_id"] == "id [bold]"
    assert found["server_version"] == __version__
    assert (found["model_repository_path[0]"], found["model_repository_path[1]"]) == ("/models/a", "/models/b")
    assert found["model_control_mode"] == "MODE_EXPLICIT"
    assert found["startup_models_0"] == "m"
    assert found["strict_model_config"] == "1"
    assert found["exit_timeout"] == "30"


def test_what_models_say_cannot_control_the_terminal() -> None:
    table = table_text(("Model", "Status"), [("m", "UNAVAILABLE: \x1b]0;owned\x07\x1b[2J\x9b boom")])
    assert rows(table)[1] == ["m", r"UNAVAILABLE: \u001b]0;owned\u0007\u001b[2J\u009b boom"]


def test_the_hint_of_the_demo_has_the_address_of_this_server() -> None:
    usual, other = demo_hint("http://localhost:8000"), demo_hint("https://10.0.0.1:9000")
    assert "infer add_sub 'INPUT0=[1,2,3,4]' 'INPUT1=[10,20,30,40]'\n" in usual
    assert "curl -s http://localhost:8000/v2/models/digits/infer" in usual
    assert "'INPUT1=[10,20,30,40]' --url https://10.0.0.1:9000\n" in other
    assert "localhost" not in other


@pytest.mark.parametrize(
    ("address", "tls", "url"),
    [
        ("0.0.0.0", False, "http://localhost:1"),
        ("127.0.0.1", True, "https://localhost:1"),
        ("10.0.0.1", False, "http://10.0.0.1:1"),
        ("fd00::1", False, "http://[fd00::1]:1"),
    ],
)
def test_a_port_is_reached_where_it_listens(address: str, tls: bool, url: str) -> None:
    assert server_url(address, 1, tls=tls) == url


def test_no_shell_expands_the_commands_of_the_hint() -> None:
    for line in demo_hint("http://localhost:8000").splitlines():
        if line.startswith("    "):
            words = shlex.split(line)
            unquoted = line.replace("'INPUT0=[1,2,3,4]'", "").replace("'INPUT1=[10,20,30,40]'", "")
            assert not set("[]*?{}") & set(unquoted), words


def test_the_program_is_called_by_a_name_that_the_terminal_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("naiad", "python"):
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/naiad"
    monkeypatch.setenv("PATH", str(folder))
    assert program() == "naiad"
    (folder / "naiad").unlink()
    assert program() == "python -m kernel"
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == f"{os.path.join('.venv', 'bin', 'python')} -m kernel"
    assert printing.DEFAULT_URL.endswith(":8000")
