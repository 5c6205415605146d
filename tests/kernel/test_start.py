"""The start at the command line: a zygote is started before the server is imported, and ends if it is not needed."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kernel import app
from kernel.flags.read import DEFAULTS
from kernel.start import start
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.launch.zygote_start import StartedZygote


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], int]], None]:
    """Return what replaces `kernel.app.serve` by a function of the zygote; the limit of descriptors stays."""
    monkeypatch.setattr(resource, "setrlimit", lambda number, wanted: None)

    def replace(serve: Callable[[Any], int]) -> None:
        monkeypatch.setattr(app, "serve", lambda options, notes, zygote, operator: serve(zygote))

    return replace


def is_child(pid: int) -> bool:
    return str(pid) in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_zygote_that_the_server_has_not_taken_over_ends_with_the_start(
    served: Callable[[Callable[[StartedZygote], int]], None],
) -> None:
    found = []

    def serve(zygote: StartedZygote) -> int:
        assert is_child(zygote.process.pid)
        found.append(zygote)
        return 3

    served(serve)
    before = open_descriptors()
    assert start(DEFAULTS) == 3
    assert not is_child(found[0].process.pid)
    assert open_descriptors() <= before


def test_a_zygote_that_the_server_has_taken_over_is_not_ended(
    served: Callable[[Callable[[StartedZygote], int]], None],
) -> None:
    found = []

    def serve(zygote: StartedZygote) -> int:
        zygote.take()
        found.append(zygote)
        return 0

    served(serve)
    start(DEFAULTS)
    (zygote,) = found
    assert zygote.process.poll() is None
    zygote.socket.close()  # as if the kernel were gone
    zygote.process.wait(60)
    zygote.pipes.close_own_ends()


def test_there_is_no_zygote_if_workers_are_spawned_or_if_it_cannot_be_started(
    served: Callable[[Callable[[object], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def serve(zygote: object) -> int:
        found.append(zygote)
        return 0

    served(serve)
    start(msgspec.structs.replace(DEFAULTS, worker_start="spawn"))

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no process can be started")

    before = open_descriptors()
    monkeypatch.setattr(subprocess, "Popen", fail)
    start(DEFAULTS)
    assert found == [None, None]
    assert open_descriptors() <= before


def test_the_limit_of_descriptors_is_raised_before_the_zygote_is_started() -> None:
    script = (
        "import resource; from kernel import app, start; "
        "from kernel.flags.read import DEFAULTS; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128)); "
        "app.serve = lambda options, notes, zygote, operator: "
        "print(resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE)) or 0; "
        "start.start(DEFAULTS)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "(128, 128)\n"


def test_garbage_is_not_collected_while_the_server_is_imported_and_is_afterwards(
    served: Callable[[Callable[[object], int]], None],
) -> None:
    found: list[bool] = []

    def serve(zygote: object) -> int:
        found.append(gc.isenabled())
        return 0

    served(serve)
    start(msgspec.structs.replace(DEFAULTS, worker_start="spawn"))
    assert found == [False]
    assert gc.isenabled()
