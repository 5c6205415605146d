"""Three servers over `tests/models` for all conformance tests, in explicit mode."""

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


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Return a function that returns the server with a value of `--worker-shared-memory`, or with all workers at an
    agent (`agent`), until the end of all tests.

    A fixture with parameters would be made anew at each change of the value, of which there are two in each file.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(shared_memory: str) -> ServerProcess:
            models = Path(__file__).parents[1] / "models"
            flags = ["--model-control-mode=explicit", "--load-model=*"]
            if shared_memory == "agent":
                agent = stack.enter_context(AgentProcess(tmp_path_factory.mktemp("agent")))
                flags += ["--launcher=agent", f"--agents={agent.address}"]
            else:
                flags.append(f"--worker-shared-memory={shared_memory}")
            running = stack.enter_context(ServerProcess(models, *flags))
            stack.callback(check_log, running)
            return running

        yield of


def check_log(running: ServerProcess) -> None:
    assert "Traceback" not in running.log, running.log


@pytest.fixture(
    scope="session", params=["true", "false", "agent"], ids=["shared memory", "no shared memory", "another host"]
)
def server(request: pytest.FixtureRequest, serve: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server whose workers share memory with it, one whose workers do not, and one with workers of another host."""
    return serve(request.param)
