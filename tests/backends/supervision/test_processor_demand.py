"""What a process wants of the processors is its time and its wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from backends.supervision.processor_demand import demanded_ns, work_mark

#: Waits until it is asked to work, then uses a processor until it has used one for as long as the argument says.
PROGRAM = """
import sys, time
print(flush=True)
sys.stdin.readline()
while time.process_time_ns() < int(sys.argv[1]):
    pass
print(flush=True)
sys.stdin.readline()
"""


def test_a_process_that_works_demands_time_and_one_that_waits_does_not() -> None:
    command = [sys.executable, "-c", PROGRAM, "1_000_000_000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before, mark = demanded_ns(process.pid), work_mark(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = demanded_ns(process.pid)
        assert work_mark(process.pid) != mark
        process.stdin.close()
    assert before is not None
    assert after is not None
    assert after - before >= 500_000_000


def test_a_process_that_has_ended_demands_nothing_that_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert demanded_ns(process.pid) is None
    assert work_mark(process.pid) is None


def test_the_time_of_this_process_counts() -> None:
    found = demanded_ns(os.getpid())
    assert found is not None
    assert found >= time.process_time_ns() // 2


def test_a_process_that_waits_leaves_the_same_mark() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()  # it has started, and reads again
        while (mark := work_mark(process.pid)) != work_mark(process.pid):
            pass
        assert mark is not None
        process.stdin.close()
