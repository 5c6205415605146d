"""Two servers over `tests/models` for all conformance tests, in explicit mode."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[str], ServerProcess]]:
    """Return a function that returns the server with a value of `--worker-shared-memory`, until the end of all tests.

    A fixture with parameters would be made anew at each change of the value, of which there are two in each file.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(shared_memory: str) -> ServerProcess:
            models = Path(__file__).parents[1] / "models"
            flags = ("--model-control-mode=explicit", "--load-model=*", f"--worker-shared-memory={shared_memory}")
            running = stack.enter_context(ServerProcess(models, *flags))
            stack.callback(check_log, running)
            return running

        yield of


def check_log(running: ServerProcess) -> None:
    assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session", params=["true", "false"], ids=["shared memory", "no shared memory"])
def server(request: pytest.FixtureRequest, serve: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server whose workers share memory with it, and one whose workers are reached as on other hosts."""
    return serve(request.param)
