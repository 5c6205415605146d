"""Prepares an environment: finds it, unpacks it, or installs it, and asks its interpreter whether a worker can run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from backends.environments.archive import unpack
from backends.environments.cache import EnvironmentCache, too_large
from backends.environments.installing import Installer
from backends.environments.interpreter import (
    applied,
    ask,
    check,
    described,
    environment_folder,
    interpreter_in,
    last_lines,
    variables_of,
)
from backends.environments.messages import EnvironmentFailed, EnvironmentPrepared, EnvironmentRequest
from backends.environments.requirements import archive_key, read_requirements

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare(request: EnvironmentRequest, say: Callable[[str], None]) -> EnvironmentPrepared:
    """Prepare an environment. Blocks, also for minutes. `say` gets lines for the log. Raises `EnvironmentFailed`."""
    source = request.path or request.requirements
    lock = marker = ""
    files = [request.path]
    if request.path and not os.path.exists(request.path):
        raise EnvironmentFailed(f"the environment '{source}' does not exist (EXECUTION_ENV_PATH)")
    if request.path and os.path.isdir(request.path):
        folder = Path(request.path)
    else:
        try:
            cache = EnvironmentCache(Path(request.cache_folder), request.cache_byte_size, say)
            if request.path:
                key, make = _archive(Path(request.path), cache, Path(request.cache_folder), say)
            else:
                key, make, files = _installed(Path(request.requirements), say)
            cached = cache.prepare(key, source, make)
        except OSError as error:
            raise EnvironmentFailed(f"the environment '{source}' cannot be made: {error}") from None
        folder, lock, marker = cached.folder, str(cached.lock), str(cached.marker)
    folder = environment_folder(folder, source)
    python, variables = interpreter_in(folder), variables_of(folder, os.environ)
    found = ask(python, variables, source)
    check(found, source)
    say(f"the environment '{source}' has {described(found)}")
    return EnvironmentPrepared(python, variables, lock, marker, [*files, python])


def _archive(
    archive: Path, cache: EnvironmentCache, cache_folder: Path, say: Callable[[str], None]
) -> tuple[str, Callable[[Path], None]]:
    """Return the key of an archive's environment, and what makes it."""

    def make(folder: Path) -> None:
        say(f"unpacking the environment '{archive}'")
        unpack(archive, folder, cache.byte_size, too_large(str(archive), cache.byte_size), say)
        _conda_unpack(environment_folder(folder, str(archive)), str(archive))

    return f"archive-{archive_key(archive, cache_folder)}", make


def _installed(file: Path, say: Callable[[str], None]) -> tuple[str, Callable[[Path], None], list[str]]:
    """Return the key of the environment with the packages of a file, what makes it, and the files that it includes."""
    requirements = read_requirements(file)

    def make(folder: Path) -> None:
        Installer(file, say).make(folder, requirements)

    return f"installed-{requirements.key}", make, list(requirements.files)


def _conda_unpack(folder: Path, source: str) -> None:
    """Run `conda-unpack`, which writes the folder into files that have that of the machine where it was packed."""
    program = folder / "bin" / "conda-unpack"
    if not program.exists():
        return
    variables = variables_of(folder, os.environ)
    done = subprocess.run(
        [interpreter_in(folder), str(program)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=applied(variables, os.environ),
        check=False,
    )
    if done.returncode:
        output = last_lines(done.stdout.decode(errors="replace"))
        raise EnvironmentFailed(f"conda-unpack of the environment '{source}' failed: {output}")
