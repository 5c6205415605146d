from __future__ import annotations

import threading

from backends.worker.calls.late_release import LateRelease


def test_what_is_dropped_while_nothing_happens_is_released() -> None:
    released = threading.Semaphore(0)
    late = LateRelease(released.release, delay_s=0)
    late.signal()
    assert not released.acquire(blocking=False), "the thread is not there yet"
    for _ in range(3):
        late.start()
        assert released.acquire(timeout=20)
        late.signal()
        late.signal()
    assert released.acquire(timeout=20)


def test_the_thread_ends_when_the_kernel_is_gone() -> None:
    def release() -> None:
        raise BrokenPipeError

    late = LateRelease(release, delay_s=0)
    late.start()
    late.signal()
    assert late._thread is not None
    late._thread.join(20)
    assert not late._thread.is_alive()
