"""`make soak`: random load for minutes or hours, and whether the server holds as much at the end as at its start.

python -m tests.faults.soak --minutes 60 --rate 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from bench.machine import cpu_times, this_machine
from bench.server import ServerFailed, ServerProcess
from bench.store import write_json
from tests.faults.client import Client
from tests.faults.models import write_repository
from tests.faults.soak.holdings import Holdings, holdings
from tests.faults.soak.report import SoakReport, print_header, print_report, print_sample, row_of
from tests.faults.soak.traffic import KINDS
from tests.faults.soak.verdict import wrong
from tests.faults.stored import publish

#: Requests at the same time at most.
AT_ONCE = 32
#: Seconds between two kills of a worker.
KILLS_EVERY_S = 10.0
#: How long the server may take until nothing of the load is left.
SETTLE_TIMEOUT_S = 60.0

FLAGS = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=local")


class Soak:
    """One run: load in turns, with a sample after each, when nothing runs."""

    def __init__(self, server: ServerProcess, rate: float, seed: int) -> None:
        self._server = server
        self._rate = rate
        self._random = random.Random(seed)
        self._client = Client(server.url, server.grpc_url, self._random)
        self._began = time.monotonic()
        self.samples: list[Holdings] = []
        self.unsettled: list[str] = []
        self.kills = 0

    @property
    def client(self) -> Client:
        return self._client

    async def run(self, seconds: float, every_s: float) -> None:
        """Load the server, and take a sample every `every_s` seconds."""
        while time.monotonic() - self._began < seconds:
            await self._load(every_s)
            await self._sample()

    async def _load(self, seconds: float) -> None:
        """Start requests at random times, `rate` in a second on average, and wait for all of them."""
        self._client.open()
        free = asyncio.Semaphore(AT_ONCE)
        kinds, weights = zip(*KINDS, strict=True)
        end = time.monotonic() + seconds
        kill_at = time.monotonic() + self._random.random() * KILLS_EVERY_S
        async with asyncio.TaskGroup() as tasks:
            while (now := time.monotonic()) < end:
                if now >= kill_at:
                    self._kill()
                    kill_at += KILLS_EVERY_S
                await free.acquire()
                [kind] = self._random.choices(kinds, weights)
                task = tasks.create_task(kind(self._client))
                task.add_done_callback(lambda _: free.release())
                await asyncio.sleep(self._random.expovariate(self._rate))
        await self._client.close()

    def _kill(self) -> None:
        """End a worker or a helper, as the system does to one that takes too much memory."""
        workers = sorted(self._server.workers())
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(workers), signal.SIGKILL)
                self.kills += 1

    async def _sample(self) -> None:
        """Wait until nothing of the load is left, and read what the server holds."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while left := self._left(found := self._read()):
            if time.monotonic() > deadline:
                self.unsettled.append(f"at {found.at_s:.0f} s: {left}")
                break
            await asyncio.sleep(0.5)
        self.samples.append(found)
        print_sample(found, self.samples[0])

    def _read(self) -> Holdings:
        return holdings(self._server, time.monotonic() - self._began, self._client.ledger.sent)

    def _left(self, found: Holdings) -> str:
        """Return what is left of the load, in words."""
        left = {
            "in flight": found.in_flight,
            "leased bytes": found.leased,
            "sequences": found.sequences,
            "regions": found.regions,
        }
        text = ", ".join(f"{count} {name}" for name, count in left.items() if count)
        ready = self._server.get("/v2/health/ready")[0] == 200
        return text or ("" if ready else "a model is not ready")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=60.0, help="requests in a second, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write row S12 of docs/reliability.md")
    parser.add_argument("--every", type=float, help="seconds between two samples")
    return parser.parse_args()


def main() -> int:
    """Run. Returns 1 if something has grown or a request has no right end, else 0."""
    chosen = options()
    seconds = chosen.minutes * 60
    every_s = chosen.every or min(60.0, max(5.0, seconds / 20))
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="naiad-soak-") as temporary:
        write_repository(Path(temporary))
        try:
            with ServerProcess(Path(temporary), *FLAGS) as server:
                soak = Soak(server, chosen.rate, chosen.seed)
                print_header(seconds, chosen.rate, chosen.seed)
                asyncio.run(soak.run(seconds, every_s))
                log, cpu_s = server.log, cpu_times(server.pid).total_s
        except ServerFailed as error:
            Console().print(f"the server did not start: {error}")
            return 1
    ledger = soak.client.ledger
    faults = [*wrong(soak.samples, seconds), *ledger.wrong(), *soak.unsettled]
    faults += [line for line in log.splitlines() if "Traceback" in line]
    report = SoakReport(
        machine=machine,
        seconds=seconds,
        rate=chosen.rate,
        seed=chosen.seed,
        kills=soak.kills,
        cpu_s=cpu_s,
        outcomes={f"{kind}: {outcome}": count for (kind, outcome), count in sorted(ledger.outcomes.items())},
        texts=dict(ledger.texts.most_common(30)),
        samples=soak.samples,
        wrong=faults,
    )
    print_report(report)
    write_json(Path("build", "soak.json"), report)
    if chosen.record:
        publish([row_of(report)])
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
