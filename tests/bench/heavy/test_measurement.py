"""The watch over the memory of a process and its children."""

from __future__ import annotations

import subprocess
import sys

from bench.heavy.measurement import MemoryWatch, ResidentMemory, memory_of

MIB = 1 << 20

#: Takes 8 MiB of its own and 16 MiB of shared memory for a moment, when it reads a line.
CHILD = """
import mmap, sys
print("ready", flush=True)
for _ in sys.stdin:
    own, shared = bytearray(b"a") * (8 << 20), mmap.mmap(-1, 16 << 20)
    shared.write(bytes(16 << 20))
    del own
    shared.close()
    print("done", flush=True)
"""


def test_a_short_growth_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        with MemoryWatch(child.pid) as watch:
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"done\n"
        child.stdin.close()
    assert 23 * MIB <= watch.growth.total <= 48 * MIB


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert memory_of(ended.pid) == ResidentMemory()
    with MemoryWatch(ended.pid) as watch:
        pass
    assert watch.growth.total == 0
