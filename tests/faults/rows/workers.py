"""Workers that die, hang or take too much memory: S1 to S5."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from bench.heavy.measurement import healthy_client
from bench.machine import children_of, memory_of
from bench.server import ServerProcess, wait_for
from tests.faults.health import watched
from tests.faults.load import Load
from tests.faults.models import HOLD, KILL, TAKE, executed, waits, write_healthy, write_obey
from tests.faults.requests import ask, waits_of
from tests.faults.row import Finding, Settings, Skipped, at_most, percentile
from tests.faults.soak.holdings import kinds_of_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


def kills(settings: Settings) -> Finding:
    """S1: kill one of two workers again and again, while clients of both protocols use them."""
    count = settings.count(20, 100)
    repository = settings.repository()
    ledger = write_obey(repository, config="max_batch_size: 4\n" + waits(3), noted=True)
    detected_ms: list[float] = []
    recovered_ms: list[float] = []
    with ServerProcess(repository) as server, Load(server) as load:
        load.wait_for_answers(2000)
        memory, descriptors = memory_of(server.pid).private, kinds_of_descriptors(server.pid)
        for _ in range(count):
            load.wait_for_answers(100)
            victim = random.choice(sorted(server.workers("obey")))
            ready = server.log.count("is ready again")
            moment = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            _wait_until(lambda ready=ready: server.log.count("is ready again") > ready)
            recovered_ms.append((time.monotonic() - moment) * 1e3)
            if (failed := load.first_error_after(moment)) is not None:
                detected_ms.append((failed - moment) * 1e3)
        load.wait_for_answers(500)
        grown = memory_of(server.pid).private - memory
        more = kinds_of_descriptors(server.pid) - descriptors
    errors = load.ledger.texts
    twice = [number for number, times in executed(ledger).items() if times > 1]
    wrong = [*load.ledger.wrong()]
    wrong += [f"{text!r} does not name the signal" for text in errors if "signal N" not in text]
    wrong += [f"{len(twice)} requests were executed twice"] if twice else []
    wrong += at_most("errors", errors.total(), 4 * count)
    wrong += at_most("p99 of the detection", percentile(detected_ms, 0.99), 50, " ms")
    wrong += at_most("recovery", max(recovered_ms), 1000, " ms")
    wrong += at_most("growth", grown / MIB, 5, " MiB")
    figure = (
        f"{count} kills, {load.ledger.sent:,} requests: {errors.total()} errors (those being executed), 0 lost, "
        f"{len(twice)} executed twice, first error after {percentile(detected_ms, 0.5):.0f} ms (p99 "
        f"{percentile(detected_ms, 0.99):.0f}), full again after {max(recovered_ms):.0f} ms at most, private memory "
        f"{grown / MIB:+.1f} MiB, descriptors {more.total():+}"
    )
    return Finding(figure, wrong, list(errors))


def _wait_until(condition: object, timeout_s: float = 30.0) -> None:
    """Wait in steps of a millisecond."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.001)


def kills_without_spare(settings: Settings) -> Finding:
    """S2: kill the only worker of a model: how long no request succeeds."""
    count = settings.count(10, 100)
    repository = settings.repository()
    write_obey(repository, instances=1, config="max_batch_size: 4\n" + waits(3))
    gaps_ms: list[float] = []
    with ServerProcess(repository) as server, Load(server, http=2, grpc=2) as load:
        for _ in range(count):
            load.wait_for_answers(100)
            [victim] = server.workers("obey")
            moment = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            _wait_until(lambda victim=victim: victim not in server.workers("obey") and server.workers("obey"))
            load.wait_for_answers(4)
            gaps_ms.append((min(at for at, ok in load.finished_at if ok and at > moment + 0.005) - moment) * 1e3)
    wrong = [*load.ledger.wrong(), *at_most("the longest gap", max(gaps_ms), 1000, " ms")]
    figure = (
        f"{count} kills: no success for {percentile(gaps_ms, 0.5):.0f} ms (median), {max(gaps_ms):.0f} ms at most; "
        f"{load.ledger.texts.total()} errors"
    )
    return Finding(figure, wrong, list(load.ledger.texts))


def crash_loop(settings: Settings) -> Finding:
    """S3: requests of one client crash their model again and again; what others of another model notice."""
    repository = settings.repository()
    write_obey(repository, instances=1)
    write_healthy(repository)
    seconds = settings.count(6, 60)
    statuses: Counter[str] = Counter()
    stop = threading.Event()

    def poison() -> None:
        while not stop.is_set():
            status, text = ask(server, KILL - 11)
            statuses[f"{status} {text}" if status != 200 else "200"] += 1

    with ServerProcess(repository) as server, healthy_client({"http": server.http_port}) as healthy:
        before = waits_of(healthy, 3)
        threads = [threading.Thread(target=poison) for _ in range(4)]
        for thread in threads:
            thread.start()
        after = waits_of(healthy, seconds)
        stop.set()
        for thread in threads:
            thread.join()
        restarts = server.log.count("is ready again")
        alive = server.get("/v2/health/live")[0] == 200
    limit = max(50.0, 3 * before.p99_ms)
    wrong = [*after.failures[:3], *at_most("p99 of the others", after.p99_ms, limit, " ms")]
    wrong += [] if alive else ["the server does not live"]
    figure = (
        f"{statuses.total()} poison requests in {seconds} s, {restarts} restarts; others' p99 {before.p99_ms:.1f} ms "
        f"before, {after.p99_ms:.1f} ms meanwhile"
    )
    return Finding(figure, wrong, list(statuses))


def hangs(settings: Settings) -> Finding:
    """S4: a model that holds the interpreter lock for ever, with a limit of a second; a worker that is stopped."""
    repository = settings.repository()
    limit = 'parameters { key: "naiad.execution_timeout" value { string_value: "1" } }\n'
    ledger = write_obey(repository, instances=1, config="max_batch_size: 4\n" + limit, noted=True)
    took_s: list[float] = []
    texts: list[str] = []
    with ServerProcess(repository) as server:
        for _ in range(settings.count(3, 20)):
            moment = time.monotonic()
            status, text = ask(server, HOLD)
            texts.append(f"{status} {text}")
            while ask(server, 1)[0] != 200:
                time.sleep(0.01)
            took_s.append(time.monotonic() - moment)
        [worker] = server.workers("obey")
        os.kill(worker, signal.SIGSTOP)
        results: list[tuple[int, str]] = []
        late = threading.Thread(target=lambda: results.append(ask(server, 777)))
        late.start()
        late.join(1.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
        late.join(30)
        while ask(server, 2)[0] != 200:
            time.sleep(0.01)
    double = [number for number, times in executed(ledger).items() if number > 2 and times > 1]
    wrong = at_most("replaced after", max(took_s), 3.0, " s")
    wrong += [f"status {text[:60]}" for text in texts if text.startswith("200")]
    wrong += ["a request had no response"] if not results else []
    wrong += ["a request was executed twice"] if double else []
    figure = (
        f"{len(took_s)} hangs with a limit of 1 s: replaced and serving after {max(took_s):.2f} s at most; a stopped "
        f"worker: {len(results)} response, 0 double"
    )
    return Finding(figure, wrong, texts)


@contextlib.contextmanager
def _memory_group(limit_byte_size: int) -> Iterator[Path]:
    """Make a control group with a limit of memory. Raises `Skipped` where that is not allowed."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = root / f"naiad-faults-{os.getpid()}"
        try:
            group.mkdir()
            name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
            (group / name).write_text(str(limit_byte_size))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                wait_for(lambda group=group: not (group / "cgroup.procs").read_text(), 5)  # type: ignore[misc]
                group.rmdir()
        return
    raise Skipped("control groups with a limit of memory are not allowed here")


def out_of_memory(settings: Settings) -> Finding:
    """S5: the memory of the server's control group runs out, because a model takes it."""
    repository = settings.repository()
    write_obey(repository, instances=1)
    write_healthy(repository)
    count = settings.count(3, 10)
    texts: list[str] = []
    with _memory_group(400 * MIB) as group, ServerProcess(repository) as server, watched(server) as health:
        for pid in [server.pid, *children_of(server.pid)]:
            (group / "cgroup.procs").write_text(str(pid))
        resident = memory_of(server.pid).private
        for _ in range(count):
            status, text = ask(server, TAKE - 1000)
            texts.append(f"{status} {text}")
            while ask(server, 1)[0] != 200:
                time.sleep(0.01)
        waited = health.counted()
        grown = memory_of(server.pid).private - resident
    named = [text for text in texts if "signal 9" in text]
    wrong = [] if len(named) == count else [f"{text!r} does not name the signal" for text in texts]
    wrong += waited.failures[:3]
    figure = (
        f"{count} times: {len(named)} errors name the signal, the server lives (private memory {grown / MIB:+.1f} MiB, "
        f"health p99 {waited.p99_ms:.0f} ms), the model serves again"
    )
    return Finding(figure, wrong, texts)
