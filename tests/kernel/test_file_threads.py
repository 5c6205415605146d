"""Threads for files: one that hangs keeps neither others nor the process from their ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from kernel import file_threads
from kernel.file_threads import in_file_thread, oldest_path, uses
from tests.kernel.repository_lab import until


def test_the_result_or_the_error_of_the_function_is_that_of_the_call() -> None:
    async def main() -> None:
        assert await in_file_thread(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_file_thread(divmod, 7, 0)

    asyncio.run(main())


def test_only_some_threads_work_at_a_time_and_all_work_is_done() -> None:
    working, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal working, most
        with lock:
            working += 1
            most = max(most, working)
        with lock:
            working -= 1
        return number

    async def main() -> None:
        assert await asyncio.gather(*(in_file_thread(work, n) for n in range(100))) == list(range(100))

    asyncio.run(main())
    assert most <= file_threads.WORKING_THREADS


def test_a_thread_works_again_and_ends_when_it_has_had_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_threads, "IDLE_S", 60)

    async def main() -> None:
        used = {await in_file_thread(threading.get_ident) for _ in range(20)}
        assert len(used) == 1
        await in_file_thread(monkeypatch.setattr, file_threads, "IDLE_S", 0.01)  # before the thread waits again
        await until(lambda: used.isdisjoint(thread.ident for thread in threading.enumerate()))
        assert await in_file_thread(divmod, 7, 2) == (3, 1)

    asyncio.run(main())


def test_threads_that_hang_make_place_for_others_and_say_which_path_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_threads, "WAITING_S", 0.001)
    end = threading.Event()

    def hang(number: int) -> None:
        uses(f"/hung/{number}")
        end.wait(60)

    async def main() -> None:
        hung = [asyncio.ensure_future(in_file_thread(hang, n)) for n in range(file_threads.WORKING_THREADS)]
        assert await in_file_thread(divmod, 7, 2) == (3, 1)
        await until(lambda: oldest_path().startswith("/hung/"))
        end.set()
        await asyncio.gather(*hung)
        assert oldest_path() == ""

    asyncio.run(main())


def test_a_cancelled_call_does_not_wait_for_its_thread_nor_for_its_turn() -> None:
    begun, end = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        end.wait(60)

    async def main() -> None:
        calls = [asyncio.ensure_future(in_file_thread(hang)) for _ in range(file_threads.WORKING_THREADS + 2)]
        for _ in range(file_threads.WORKING_THREADS):
            await asyncio.to_thread(begun.acquire)
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        end.set()
        assert await in_file_thread(divmod, 7, 2) == (3, 1)

    asyncio.run(main())


HUNG = """
import asyncio, threading
from kernel.file_threads import in_file_thread

async def main():
    begun = threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    call = asyncio.ensure_future(in_file_thread(hang))
    await asyncio.to_thread(begun.wait)
    call.cancel()

asyncio.run(main())
print("ended")
"""


def test_the_process_ends_while_a_thread_hangs() -> None:
    found = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "ended\n"
