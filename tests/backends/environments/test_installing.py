"""How packages are installed, with programs that play uv, and with pip without an index."""

from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from backends.environments.installing import Installer
from backends.environments.interpreter import ask, interpreter_in, variables_of
from backends.environments.messages import EnvironmentFailed
from backends.environments.progress import INTERVAL_NS, ShownLines
from backends.environments.requirements import Requirements, read_requirements

if TYPE_CHECKING:
    from pathlib import Path

#: Plays uv: writes down its arguments, and makes a `bin/python` that is this interpreter.
UV = f"""#!{sys.executable}
import os, sys
with open(os.environ["PLAYED_UV"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
print("resolved a package")
if sys.argv[1] == "venv":
    os.makedirs(sys.argv[-1] + "/bin", exist_ok=True)
    python = sys.argv[-1] + "/bin/python"
    with open(python, "w") as file:
        file.write('#!/bin/sh\\nexec {sys.executable} "$@"\\n')
    os.chmod(python, 0o755)
elif "bad" in sys.argv:
    sys.exit("  x No solution found: bad is not there")
"""


class Played:
    """An installer with the played uv."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands = tmp_path / "commands"
        monkeypatch.setenv("PLAYED_UV", str(self.commands))
        uv = tmp_path / "uv"
        uv.write_text(UV)
        uv.chmod(0o755)
        self.said: list[str] = []
        self.file = tmp_path / "requirements.txt"
        self.file.write_text("six\n")
        self.folder = tmp_path / "made"
        self.folder.mkdir()
        self.installer = Installer(self.file, self.said.append, str(uv))

    def make(self, *arguments: str, python: str = "") -> list[str]:
        self.installer.make(self.folder, Requirements(arguments, python, "key", ()))
        return self.commands.read_text().splitlines()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_uv_makes_the_environment_and_installs(played: Played) -> None:
    commands = played.make("-r", str(played.file))
    assert commands == [
        f"venv --quiet --no-project --allow-existing --python {sys.executable} {played.folder}",
        f"pip install --python {played.folder}/bin/python -r {played.file}",
    ]
    assert played.said[0] == f"installing the packages of '{played.file}' with uv"
    assert "resolved a package" in played.said
    assert played.said[-1].startswith(f"the packages of '{played.file}' were installed in ")


def test_uv_is_asked_for_another_python_where_ours_does_not_fit(played: Played) -> None:
    assert " --python <3 " in played.make("six", python="<3")[0]


def test_the_end_of_what_the_installer_has_printed_is_the_reason(played: Played) -> None:
    with pytest.raises(EnvironmentFailed) as failure:
        played.make("bad")
    assert str(failure.value) == (
        f"the packages of '{played.file}' cannot be installed (the server ignores this file with "
        "--install-requirements=false): resolved a package; x No solution found: bad is not there"
    )


def test_without_uv_another_python_is_refused(played: Played) -> None:
    installer = Installer(played.file, played.said.append, "")
    with pytest.raises(EnvironmentFailed, match=r"requires Python <3, and the server has 3\..*where uv is installed"):
        installer.make(played.folder, Requirements(("six",), "<3", "key", ()))


def wheel(folder: Path, name: str, content: str) -> None:
    """Write a package that is installed without an index."""
    about = f"{name}-1.dist-info"
    record = "".join(
        f"{path},,\n" for path in (f"{name}.py", *(f"{about}/{n}" for n in ("METADATA", "WHEEL", "RECORD")))
    )
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as opened:
        opened.writestr(f"{name}.py", content)
        opened.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        opened.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{about}/RECORD", record)


@pytest.mark.slow
def test_pip_installs_packages_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy is a package that plays it: no index is asked."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    for name in ("numpy", "msgspec", "mine"):
        wheel(tmp_path, name, "__version__ = '1'\n")
    file = tmp_path / "requirements.txt"
    file.write_text("./numpy-1-py3-none-any.whl\n./msgspec-1-py3-none-any.whl\n./mine-1-py3-none-any.whl\n")
    folder, said = tmp_path / "made", list[str]()
    folder.mkdir()
    Installer(file, said.append, "").make(folder, read_requirements(file))
    found = ask(interpreter_in(folder), variables_of(folder, os.environ), "it")
    assert (found.numpy, found.msgspec) == ("1", "1")
    assert list(folder.glob("lib/*/site-packages/mine.py"))
    file.write_text("not-there-at-all\n")
    with pytest.raises(EnvironmentFailed, match="ERROR: No matching distribution found for not-there-at-all"):
        Installer(file, said.append, "").make(folder, read_requirements(file))


def test_lines_of_progress_come_at_intervals() -> None:
    lines = ShownLines()
    shown = [lines.shows(now) for now in (0, 1, INTERVAL_NS - 1, INTERVAL_NS, INTERVAL_NS + 1, 3 * INTERVAL_NS)]
    assert shown == [True, False, False, True, False, True]
