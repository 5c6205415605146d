"""`make image`, with a program in place of a builder that responds what builders respond."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.docs.documents import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_BUILDER = """#!/bin/sh
case "$*" in
    build*) [ "{fails_at}" != build ] ;;
    push*) truncate --size={layers} "${{4#docker-archive:}}" ;;
    from*) echo container ;;
    *"id -u") echo {user} ;;
    *"du "*) echo "{files} /" ;;
    run*) echo responses; [ "{fails_at}" != run ] ;;
    rm*) touch {folder}/removed ;;
esac
"""


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, "naiad:checked: 200 MB in layers, 150 MB in files"),
        ({"layers": 301_000_000}, "error: the image has more than 300 MB"),
        ({"files": 301_000_000}, "error: the image has more than 300 MB"),
        ({"user": 0}, "error: the container runs as root"),
        ({"fails_at": "build"}, "error: the image was not built"),
        ({"fails_at": "run"}, "error: responses"),
    ],
)
def test_the_image_is_built_measured_and_tried(tmp_path: Path, answers: dict[str, int | str], said: str) -> None:
    values = {"layers": 200_000_000, "files": 150_000_000, "user": 10001, "fails_at": "nothing", "folder": tmp_path}
    program = tmp_path / "buildah"
    program.write_text(_BUILDER.format(**values | answers))
    program.chmod(0o755)
    command = [sys.executable, "-m", "tests.image"]
    environment = {"BUILDER": str(program), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == (1 if said.startswith("error: ") else 0), done.stderr
    assert said in (done.stderr if done.returncode else done.stdout)
    # No container is left behind, however it went.
    assert (tmp_path / "removed").exists() == (answers.get("fails_at") != "build")


def test_a_machine_without_a_builder_is_told_which_would_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.image"]
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr == "error: an image is built by docker or podman or buildah: none of them is installed\n"
    assert done.returncode == 1
