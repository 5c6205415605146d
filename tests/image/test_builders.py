"""`make image`: which program builds, and with which commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.image.builders import Builder, NoBuilder, find_builder

if TYPE_CHECKING:
    from collections.abc import Callable


def installed(*programs: str) -> Callable[[str], str | None]:
    return lambda name: f"/usr/bin/{name}" if name.rpartition("/")[2] in programs else None


def test_the_first_program_that_is_there_builds() -> None:
    assert find_builder("", installed("podman", "buildah")) == Builder("podman", ("podman",))
    assert find_builder("", installed("buildah")) == Builder("buildah", ("buildah",))


def test_a_program_can_be_named_with_its_options() -> None:
    found = find_builder("/usr/bin/buildah --root=/tmp/x", installed("docker", "buildah"))
    assert found.program == "buildah"
    assert found.command("images") == ["/usr/bin/buildah", "--root=/tmp/x", "images"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("", "an image is built by docker or podman or buildah: none of them is installed"),
        ("podman", "'podman' is not installed"),
        ("make", "BUILDER is docker or podman or buildah, not 'make'"),
    ],
)
def test_what_is_missing_is_said(wanted: str, message: str) -> None:
    with pytest.raises(NoBuilder) as caught:
        find_builder(wanted, installed())
    assert str(caught.value) == message


@pytest.mark.parametrize("program", ["docker", "podman", "buildah"])
def test_every_program_has_a_command_for_each_step(program: str) -> None:
    builder = Builder(program, (program,))
    build = builder.build(("--no-cache",))
    assert build[:2] == [program, "build"]
    assert build[-2:] == ["--no-cache", "."]
    # Without this format podman and buildah leave the health check out.
    assert ("--format=docker" in build) == (program != "docker")
    assert "image.tar" in builder.save(Path("image.tar"))[-1] or "image.tar" in builder.save(Path("image.tar"))[-2]
    assert builder.start(())[-1] == "naiad:checked"
    assert ("--read-only" in builder.start(())) == builder.runs_containers
    assert builder.run("c", "id", "-u")[-2:] == ["id", "-u"]
    assert builder.remove("c")[-1] == "c"
