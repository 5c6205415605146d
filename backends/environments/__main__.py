"""Entry point of the process that prepares an environment: `python -m backends.environments --fd N ...`.

Prepares an environment: finds it, unpacks it, or installs it, and asks its interpreter whether a worker can run.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.environments import messages
from backends.environments.archive import unpack
from backends.environments.cache import EnvironmentCache, too_large
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
from backends.environments.requirements import Installer, archive_key, read_requirements
from backends.process_control import die_with_parent, set_process_name

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


def main() -> None:
    """Respond on the socket to the request of the command line."""
    parser = argparse.ArgumentParser(description="Prepares an environment of a model; started by the server.")
    parser.add_argument("--model", required=True, help="name of the model, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="this process's end of the socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--request", required=True, help="the request as JSON")
    arguments = parser.parse_args()
    die_with_parent(arguments.kernel)
    set_process_name(f"env {arguments.model}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C only the kernel acts
    request = messages.request_decoder.decode(arguments.request)
    response: messages.EnvironmentPrepared | messages.EnvironmentRefused
    try:
        response = prepare(request, _say)
    except messages.EnvironmentFailed as error:
        response = messages.EnvironmentRefused(str(error))
    with socket.socket(fileno=arguments.fd) as connection:
        connection.sendall(messages.encode(response))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
