"""A worker runs on the CPUs that its host policy names, with all of its threads."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from backends.process_control import run_on
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    run_on(before)


def test_threads_that_run_already_are_bound_too() -> None:
    one = {min(os.sched_getaffinity(0))}
    bound = threading.Event()
    found: list[set[int]] = []

    def wait() -> None:
        bound.wait()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=wait)
    thread.start()
    run_on(one)
    bound.set()
    thread.join()
    assert os.sched_getaffinity(0) == one
    assert found == [one]


@pytest.mark.parametrize("cpu", [700, 2**20, 2**40])
def test_cpus_that_the_machine_does_not_have_are_refused(cpu: int) -> None:
    with pytest.raises(InternalError, match="^Unable to set NUMA thread affinity: "):
        run_on([cpu])
