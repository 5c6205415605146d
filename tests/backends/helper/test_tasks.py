"""A helper reads and writes regions of clients, and survives what clients do to them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends.helper.tasks import NICENESS, RegionIo, TaskRunner
from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.worker.memory import AttachedRegion, AttachedRegions
from backends.worker.output_memory import ArenaOutputs
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from pathlib import Path

CLIENT, KERNEL = RegionNumber(1), RegionNumber(2)


class Lab:
    """A client's region of 8 KiB, from byte 100 of its object on, and an arena of the kernel."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.client, self.kernel = os.memfd_create("client"), os.memfd_create("kernel")
        os.ftruncate(self.client, 100 + 8192)
        os.ftruncate(self.kernel, 8192)
        self.regions = AttachedRegions()
        self.regions.attach(1, AttachedRegion(os.dup(self.client), 8192, 100, writable=True, volatile=True))
        self.regions.attach(2, AttachedRegion(os.dup(self.kernel), 8192, 0, writable=True, volatile=False))
        self.memory = ArenaOutputs(lambda arena: None)
        self.io = RegionIo(self.regions, self.memory, self.sent.append)

    def close(self) -> None:
        for number in (1, 2):
            self.regions.detach(number)
        os.close(self.client)
        os.close(self.kernel)
        if self.memory.arena is not None:
            self.memory.arena.close()


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_span_is_read_into_the_helper_s_arena(lab: Lab) -> None:
    os.pwrite(lab.client, b"x" * 5000, 100 + 16)
    lab.io.read(wire.ReadSpan(7, Span(CLIENT, 16, 5000)))
    (answer,) = lab.sent
    assert isinstance(answer, wire.SpanRead)
    assert (answer.task, answer.error_text) == (7, "")
    assert answer.tensor is not None
    assert answer.tensor.span is not None
    assert lab.memory.arena is not None
    assert lab.memory.arena.region.view(answer.tensor.span.offset, 5000) == b"x" * 5000
    lab.close()


def test_a_region_that_its_owner_shortened_is_an_error_and_takes_no_memory(lab: Lab) -> None:
    os.ftruncate(lab.client, 200)
    lab.io.read(wire.ReadSpan(7, Span(CLIENT, 0, 8192)))
    os.ftruncate(lab.kernel, 8192)
    lab.io.write(wire.WriteSpan(8, Span(KERNEL, 0, 64), Span(CLIENT, 64, 64)))
    read, written = lab.sent
    assert isinstance(read, wire.SpanRead)
    assert isinstance(written, wire.SpanWritten)
    assert read.error_text == written.error_text == "shared memory region was truncated by its owner"
    assert lab.memory.arena is not None
    assert lab.memory.arena.allocator.block_count == 0
    assert os.fstat(lab.client).st_size == 200, "a write makes no region longer"
    lab.close()


def test_a_span_is_written_where_it_belongs(lab: Lab) -> None:
    os.pwrite(lab.kernel, b"y" * 64, 128)
    lab.io.write(wire.WriteSpan(8, Span(KERNEL, 128, 64), Span(CLIENT, 32, 64)))
    assert lab.sent == [wire.SpanWritten(8)]
    assert os.pread(lab.client, 66, 100 + 31) == b"\0" + b"y" * 64 + b"\0"
    lab.close()


LOWER = "import os, sys; from pathlib import Path; from backends.helper.tasks import lower_priority; "


def run(program: str, *arguments: str) -> str:
    """Run a program in a session of its own; return what it prints."""
    command = [sys.executable, "-c", LOWER + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout


def test_a_helper_and_its_session_get_low_priority() -> None:
    printed = run(
        "lower_priority(); print(os.nice(0)); group = Path('/proc/self/autogroup'); "
        "print(group.read_text() if group.exists() else '')"
    )
    niceness, groups = printed.split("\n", 1)
    assert int(niceness) == NICENESS
    assert f"nice {NICENESS}" in groups or "autogroup" not in groups


def test_a_system_without_groups_of_sessions_is_no_error(tmp_path: Path) -> None:
    assert run("lower_priority(Path(sys.argv[1])); print(os.nice(0))", str(tmp_path / "none" / "autogroup")) == "10\n"


def test_a_group_that_was_changed_just_now_is_changed_a_little_later() -> None:
    program = """
class Busy:
    refusals = 1
    def write_text(self, text):
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError
        print(text)
lower_priority(Busy())
"""
    assert run("\n" + program) == f"{NICENESS}\n"


def test_a_group_that_stays_busy_is_left_as_it_is() -> None:
    program = """
class Busy:
    attempts = 0
    def write_text(self, text):
        self.attempts += 1
        raise BlockingIOError
busy = Busy()
lower_priority(busy)
print(busy.attempts)
"""
    assert run("\n" + program) == "3\n"


def test_a_result_that_is_too_large_fails_the_task_and_not_the_helper(lab: Lab) -> None:
    sent: list[wire.ToKernel] = []

    def send(message: wire.ToKernel) -> None:
        if not isinstance(message, wire.TaskFailed):
            raise FrameTooLarge(1 << 30)
        sent.append(message)

    runner = TaskRunner(lab.regions, lab.memory, send, "tests.backends.helper.task_functions")
    for number, name in enumerate(("reverse", "double")):
        runner.run(wire.RunTask(number, name, b"", [Tensor("", "UINT8", [5000], bytes(5000))]))
    assert [message.task for message in sent if isinstance(message, wire.TaskFailed)] == [0, 1]
    assert lab.memory.arena is not None
    assert lab.memory.arena.allocator.block_count == 0
    lab.close()
