"""Servers over `tests/models` for all conformance tests, in explicit mode."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess
from tests.backends.hosts.agent_process import AgentProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


WITH_DOORS = "front door processes"

REMOTE = "another host"

DOORS = 2

#: The servers, and their flags.
FLAGS = {
    "shared memory": (),
    "no shared memory": ("--worker-shared-memory=false",),
    WITH_DOORS: (f"--front-door-processes={DOORS}",),
    REMOTE: ("--launcher=agent",),
}


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Return a function that returns the server of a kind, until the end of all tests.

    A fixture with parameters would be made anew at each change of the value, of which there are two in each file.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(kind: str) -> ServerProcess:
            models, more = Path(__file__).parents[1] / "models", list(FLAGS[kind])
            if kind == REMOTE:
                agent = stack.enter_context(AgentProcess(tmp_path_factory.mktemp("agent")))
                more.append(f"--agents={agent.address}")
            running = stack.enter_context(
                ServerProcess(models, "--model-control-mode=explicit", "--load-model=*", *more)
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
    """A server whose workers share memory with it, one whose workers do not, one with front doors in processes of
    their own, and one whose workers are started by an agent."""
    return serve(request.param)
