"""Three servers over `tests/models` for all conformance tests, in explicit mode."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


WITH_DOORS = "front door processes"

DOORS = 2

#: The servers, and their flags.
FLAGS = {
    "shared memory": (),
    "no shared memory": ("--worker-shared-memory=false",),
    WITH_DOORS: (f"--front-door-processes={DOORS}",),
}


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[str], ServerProcess]]:
    """Return a function that returns the server of a kind, until the end of all tests.

    A fixture with parameters would be made anew at each change of the value, of which there are two in each file.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(kind: str) -> ServerProcess:
            models = Path(__file__).parents[1] / "models"
            running = stack.enter_context(
                ServerProcess(models, "--model-control-mode=explicit", "--load-model=*", *FLAGS[kind])
            )
            stack.callback(check_log, running)
            for number in range(1, DOORS + 1) if kind == WITH_DOORS else ():
                running.wait_for_log(f"front door {number} takes connections")
            return running

        yield of


def check_log(running: ServerProcess) -> None:
    assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session", params=FLAGS)
def server(request: pytest.FixtureRequest, serve: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server whose workers share memory with it, one whose workers are reached as on other hosts, and one with front
    doors in processes of their own."""
    return serve(request.param)
