"""The whole server: killed, stopped under load, and what clients that leave cost it: S6, S7, S8."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import children_of, memory_of
from bench.server import ServerProcess, wait_for
from tests.faults.client import SERVICE, Client, number_body, number_message
from tests.faults.ledger import Outcome
from tests.faults.load import Load
from tests.faults.models import executed, waits, write_obey
from tests.faults.requests import ask
from tests.faults.row import Finding, Settings, at_most
from tests.faults.soak.holdings import kinds_of_descriptors, sums_of_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def _seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    wait_for(condition)
    return time.monotonic() - began


def killed(settings: Settings) -> Finding:
    """S6: SIGKILL for the server itself, under load; processes and names that it leaves, and the next start."""
    repository = settings.repository()
    write_obey(repository)
    ended_s: list[float] = []
    rebound_s: list[float] = []
    names = set(os.listdir("/dev/shm"))
    for _ in range(settings.count(2, 10)):
        server = ServerProcess(repository)
        server.start()
        with contextlib.ExitStack() as stack:
            load = stack.enter_context(Load(server))
            load.wait_for_answers(200)
            children = children_of(server.pid)
            os.kill(server.pid, signal.SIGKILL)
            ended_s.append(_seconds_until(lambda children=children: not any(map(_lives, children))))  # type: ignore[misc]
        server.wait()
        rebound_s.append(_seconds_until(lambda port=server.http_port: _can_be_bound(port)))  # type: ignore[misc]
        server.stop()
    left = set(os.listdir("/dev/shm")) - names
    wrong = [
        *at_most("the end of the workers", max(ended_s), 1.0, " s"),
        *at_most("rebinding", max(rebound_s), 2, " s"),
    ]
    wrong += [f"names are left in /dev/shm: {sorted(left)}"] if left else []
    figure = (
        f"{len(ended_s)} times: all processes ended within {max(ended_s) * 1e3:.0f} ms, {len(left)} names left in "
        f"/dev/shm, port bound again after {max(rebound_s) * 1e3:.0f} ms"
    )
    return Finding(figure, wrong)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _can_be_bound(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def stopped(settings: Settings) -> Finding:
    """S7: SIGTERM under load: whatever a model had begun is answered, and the server ends with 0."""
    executed_count = unanswered = 0
    codes: list[int] = []
    took_s: list[float] = []
    texts: set[str] = set()
    for turn in range(settings.count(3, 20)):
        repository = settings.folder / f"models-{turn}"
        ledger = write_obey(repository, config="max_batch_size: 4\n" + waits(3), noted=True)
        server = ServerProcess(repository)
        server.start()
        with Load(server) as load:
            load.wait_for_answers(300)
            began = time.monotonic()
            server.terminate()
            codes.append(server.wait())
            took_s.append(time.monotonic() - began)
        server.stop()
        begun = set(executed(ledger))
        executed_count += len(begun)
        unanswered += len(begun - load.answered)
        texts |= {text for text in load.ledger.texts if "Cannot connect" not in text and "refused" not in text}
    wrong = [f"exit codes {codes}"] if any(codes) else []
    wrong += [f"{unanswered} executed requests had no response"] if unanswered else []
    wrong += at_most("the drain", max(took_s), 30, " s")
    figure = (
        f"{len(codes)} times under 32 clients: {executed_count:,} requests executed, {unanswered} of them without a "
        f"response; exit code 0 after {max(took_s):.2f} s at most"
    )
    return Finding(figure, wrong, sorted(texts))


def cancelled(settings: Settings) -> Finding:
    """S8: clients cancel or leave: what is queued is never executed, what is executed sees it."""
    count = settings.count(2000, 10_000)
    repository = settings.repository()
    config = "max_batch_size: 4\n" + waits(2)
    ledger = write_obey(repository, instances=1, config=config, noted=True)
    with ServerProcess(repository) as server:
        assert ask(server, 1)[0] == 200
        memory, descriptors = memory_of(server.pid).private, kinds_of_descriptors(server.pid)
        client = Client(server.url, server.grpc_url, random.Random(1))
        asyncio.run(_leave(client, count))
        notice_ms = asyncio.run(_notices(client, ledger, settings.count(20, 100)))
        wait_for(lambda: not sums_of_metrics(server.get("/metrics", server.metrics_port)[1]).get(
            "naiad_inference_in_flight_requests", 0))  # fmt: skip
        assert ask(server, 2)[0] == 200
        wait_for(lambda: not kinds_of_descriptors(server.pid) - descriptors)
        grown = memory_of(server.pid).private - memory
    late = [number for number in executed(ledger) if number > 1_000_000]
    wrong = [f"{len(late)} requests were executed that had left the queue"] if late else []
    wrong += at_most("the end of a cancelled execution", max(notice_ms), 150, " ms")
    wrong += [*at_most("growth", grown / MIB, 5, " MiB"), *client.ledger.wrong()]
    figure = (
        f"{count:,} queued requests left over both protocols: {len(late)} executed; cancelled executions ended after "
        f"{max(notice_ms):.0f} ms at most; private memory {grown / MIB:+.1f} MiB, descriptors as before"
    )
    return Finding(figure, wrong, list(client.ledger.texts))


async def _leave(client: Client, count: int) -> None:
    """Queue requests behind one that takes seconds, and leave all of them before it ends."""
    client.open()
    longest = client.grpc.unary_unary(f"{SERVICE}ModelInfer")(number_message("obey", -60_000), timeout=120)
    await asyncio.sleep(0.3)
    for first in range(0, count, 500):
        numbers = range(1_000_001 + first, 1_000_001 + min(count, first + 500))
        calls = [asyncio.create_task(_queued(client, number)) for number in numbers]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.1)
    longest.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await longest
    await client.close()


async def _queued(client: Client, number: int) -> None:
    entry = client.ledger.begin("queued")
    try:
        if number % 2:
            call = client.grpc.unary_unary(f"{SERVICE}ModelInfer")(number_message("obey", number), timeout=120)
            await call
        else:
            await client.post("/v2/models/obey/infer", number_body(number))
    except asyncio.CancelledError:
        client.ledger.end(entry, Outcome.LEFT)
        raise
    client.ledger.end(entry, Outcome.WRONG, "a queued request was answered")


async def _notices(client: Client, ledger: Path, count: int) -> list[float]:
    """Cancel executions. Returns how long each went on: until the instance executed the next request."""
    client.open()
    took_ms: list[float] = []
    call = client.grpc.unary_unary(f"{SERVICE}ModelInfer")
    for number in range(count):
        running = call(number_message("obey", -30_000), timeout=60)
        await asyncio.sleep(0.05)
        began = time.monotonic()
        running.cancel()
        await call(number_message("obey", 500_000 + number), timeout=60)
        took_ms.append((time.monotonic() - began) * 1e3)
    await client.close()
    return took_ms
