"""The programs that build and run the image of docs/deploy: docker, podman, buildah. Which command each has. Pure."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: In this order: with the first two the image is also run as its process 1, without rights and on a read-only disk.
PROGRAMS = ("docker", "podman", "buildah")

CONTAINERFILE = "docs/deploy/Containerfile"

#: What the image is called.
TAG = "naiad:checked"

#: A server with the demo models, in a container that may write to /tmp only.
_RUN = "--detach --read-only --tmpfs=/tmp --cap-drop=ALL --security-opt=no-new-privileges --network=none"


class NoBuilder(Exception):
    """There is no program that can build images. The message says which would do."""


class Builder(NamedTuple):
    """A program that builds images."""

    #: One of `PROGRAMS`.
    program: str
    #: How it is called, and the options that it always gets.
    words: tuple[str, ...]

    @property
    def runs_containers(self) -> bool:
        """Whether containers run in the background, with a process 1 of their own."""
        return self.program != "buildah"

    def command(self, *words: str) -> list[str]:
        return [*self.words, *words]

    def build(self, more: Sequence[str]) -> list[str]:
        """Return the command that builds the image in a checkout; `more` are words of the user."""
        words = ["build", f"--file={CONTAINERFILE}", f"--tag={TAG}", *more, "."]
        if self.program != "docker":  # docker finds the file itself, and has no other format
            words[1:1] = ["--format=docker", f"--ignorefile={CONTAINERFILE}.dockerignore"]
        return self.command(*words)

    def save(self, file: Path) -> list[str]:
        """Return the command that writes the layers of the image into one tar file."""
        if self.program == "buildah":
            return self.command("push", "--quiet", TAG, f"docker-archive:{file}")
        return self.command("save", f"--output={file}", TAG)

    def start(self, more: Sequence[str]) -> list[str]:
        """Return the command that starts a container and prints its id."""
        if self.program == "buildah":
            return self.command("from", TAG)
        return self.command("run", *_RUN.split(), "--env=NAIAD_MODEL_REPOSITORY=", *more, TAG)

    def run(self, container: str, *words: str) -> list[str]:
        """Return the command that runs `words` in a container."""
        if self.program == "buildah":
            return self.command("run", "--env=NAIAD_MODEL_REPOSITORY=", container, "--", *words)
        return self.command("exec", container, *words)

    def remove(self, container: str) -> list[str]:
        return self.command("rm", container) if self.program == "buildah" else self.command("rm", "--force", container)


def find_builder(wanted: str, which: Callable[[str], str | None] = shutil.which) -> Builder:
    """Return the program of `wanted`, with its options (`podman --root=/tmp/x`); "" for the first that is there.

    Raises `NoBuilder`.
    """
    words = shlex.split(wanted)
    if words:
        program = os.path.basename(words[0])
        if program not in PROGRAMS:
            raise NoBuilder(f"BUILDER is {' or '.join(PROGRAMS)}, not '{words[0]}'")
        if which(words[0]) is None:
            raise NoBuilder(f"'{words[0]}' is not installed")
        return Builder(program, tuple(words))
    for program in PROGRAMS:
        if which(program) is not None:
            return Builder(program, (program,))
    raise NoBuilder(f"an image is built by {' or '.join(PROGRAMS)}: none of them is installed")
