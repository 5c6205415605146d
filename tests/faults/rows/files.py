"""Disks, descriptors, clocks and /dev/shm that fail: S13, S15, S16, and D1 to D3."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import cpu_times_of
from bench.server import ServerFailed, ServerProcess, wait_for
from tests.faults.health import watched
from tests.faults.load import Load
from tests.faults.models import write_echo, write_obey
from tests.faults.requests import ask, post
from tests.faults.row import Finding, Settings, Skipped, at_most
from tests.faults.soak.holdings import sums_of_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")

#: What counts records that were lost.
LOST = ("naiad_server_log_lines_lost_total", "naiad_traces_lost_total", "naiad_records_lost_total")


@contextlib.contextmanager
def small_disk(folder: Path, byte_size: int) -> Iterator[Path]:
    """Mount a file system in memory with a size. Raises `Skipped` where that is not allowed."""
    path = folder / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={byte_size},mode=0755", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise Skipped("file systems may not be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class ServerWithFile(ServerProcess):
    """A server whose log is a file: nothing of it is printed."""

    file: Path

    @property
    def log(self) -> str:
        return self.file.read_text(errors="replace") if self.file.exists() else super().log


def writes(disk: Path) -> list[str]:
    """Return flags that write the log, traces and records there."""
    (disk / "records").mkdir()
    return [f"--log-file={disk / 'server.log'}", "--log-verbose=1", f"--trace-config=triton,file={disk / 'trace.json'}",
            "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", "--trace-config=triton,log-frequency=1",
            f"--record={disk / 'records'}"]  # fmt: skip


def metrics_of(server: ServerProcess) -> dict[str, float]:
    return sums_of_metrics(server.get("/metrics", server.metrics_port)[1])


def disk_full(settings: Settings) -> Finding:
    """S13: the disk of the log, the traces and the records is full."""
    repository = settings.repository()
    write_obey(repository)
    with small_disk(settings.folder, 512 << 10) as disk, contextlib.ExitStack() as stack:
        server = ServerWithFile(repository, *writes(disk))
        server.file = disk / "server.log"
        stack.enter_context(server)
        with watched(server) as health, Load(server, http=2, grpc=2) as load:
            load.wait_for_answers(200)
            before = health.counted()
            (disk / "filler").write_bytes(bytes(_free_byte_size(disk)))
            load.wait_for_answers(settings.count(1000, 20_000))
            wait_for(lambda: all(metrics_of(server).get(name, 0) for name in LOST))
            waited = health.counted()
        lost = {name: int(metrics_of(server)[name]) for name in LOST}
        (disk / "filler").unlink()
        alive = ask(server, 5)[0] == 200
        code = server.stop()
    wrong = [*load.ledger.wrong(), *waited.failures[:3]]
    wrong += [f"{load.ledger.texts.total()} inferences failed"] if load.ledger.texts else []
    wrong += [] if alive and code == 0 else [f"exit code {code}"]
    figure = (
        f"{load.ledger.texts.total()} of {load.ledger.sent:,} inferences failed, health p99 {before.p99_ms:.0f} ms "
        f"before, {waited.p99_ms:.0f} ms after; counted as lost: {lost[LOST[0]]:,} lines of the log, "
        f"{lost[LOST[1]]:,} traces, {lost[LOST[2]]:,} records"
    )
    return Finding(figure, wrong, list(load.ledger.texts))


def read_only(settings: Settings) -> Finding:
    """S13b: the whole file system is read-only, but for a folder of temporary files."""
    repository = settings.repository()
    write_obey(repository)
    write_echo(repository)
    scratch = settings.folder / "scratch"
    scratch.mkdir()
    with changed_environment(TMPDIR=str(scratch)):
        try:
            server = ServerProcess(repository, *EXPLICIT, module="tests.faults.read_only_files")
            server.start()
        except ServerFailed as error:
            raise Skipped(f"a server may not have a file system of its own here: {error}"[-200:]) from error
    with contextlib.closing(_Stopping(server)), Load(server, http=4, grpc=4) as load:
        load.wait_for_answers(500)
        for worker in server.workers("obey"):
            os.kill(worker, signal.SIGKILL)
        load.wait_for_answers(500)
        reloaded = post(server, "/v2/repository/models/echo/load")[0]
        status, text = post(server, "/v2/models/echo/infer", _bytes_body(1 << 20))
    wrong = [*load.ledger.wrong()]
    wrong += [f"a reload had status {reloaded}"] if reloaded != 200 else []
    wrong += [f"a large request had status {status}: {text[:100]}"] if status != 200 else []
    wrong += [f"{text!r} is not of a killed worker" for text in load.ledger.texts if "signal" not in text]
    figure = (
        f"{load.ledger.sent:,} inferences, {load.ledger.texts.total()} failed (those of 2 killed workers, which were "
        "replaced); a reload and a request of 1 MiB succeed"
    )
    return Finding(figure, wrong, list(load.ledger.texts))


def _bytes_body(byte_size: int) -> str:
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [byte_size], "data": [7] * byte_size}
    return json.dumps({"inputs": [tensor]})


@contextlib.contextmanager
def changed_environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment, for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_byte_size(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def descriptors_used_up(settings: Settings) -> Finding:
    """S15: a thousand connections to a server that may have 256 descriptors."""
    repository = settings.repository()
    write_obey(repository)
    with ServerProcess(repository) as server, Load(server, http=2, grpc=2) as load, contextlib.ExitStack() as stack:
        load.wait_for_answers(100)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
        before_s, began = cpu_times_of(server.pid).total_s, time.monotonic()
        sent = len(load.answered)
        for _ in range(1000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", server.http_port))
        time.sleep(2.0)
        answered = len(load.answered) - sent
        spent_s = time.monotonic() - began
        part = (cpu_times_of(server.pid).total_s - before_s) / spent_s
        stack.close()
        began = time.monotonic()
        wait_for(lambda: _admitted(server))
        recovered_s = time.monotonic() - began
        load.wait_for_answers(100)
    wrong = [*load.ledger.wrong(), *at_most("recovery", recovered_s, 1.0, " s")]
    wrong += (
        [f"{load.ledger.texts.total()} inferences on connections that were open failed"] if load.ledger.texts else []
    )
    wrong += [] if answered else ["connections that were open were not served"]
    # What the clients on open connections have it do counts, too: about half a millisecond for each inference.
    wrong += at_most("processor time", part, 0.2 + 0.001 * answered / spent_s)
    figure = (
        f"1,000 connections with 256 descriptors: {answered:,} inferences on 4 open connections went on, 0 failed; "
        f"{part:.0%} of a processor in all; new connections again after {recovered_s * 1e3:.0f} ms"
    )
    return Finding(figure, wrong, list(load.ledger.texts))


def _admitted(server: ServerProcess) -> bool:
    with contextlib.suppress(OSError):
        return server.get("/v2/health/live")[0] == 200
    return False


#: Makes the clock on the wall of every Python process jump by an hour to and fro, each half second.
JUMPING_CLOCK = """
import datetime, time
_time, _time_ns = time.time, time.time_ns

def _offset_s():
    return 3600 if int(time.monotonic() * 2) % 2 else -3600

time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
"""


def clock_jumps(settings: Settings) -> Finding:
    """S16: the clock of the server and its workers jumps by two hours, to and fro, twice a second."""
    folder = settings.folder / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(JUMPING_CLOCK)
    repository = settings.repository()
    config = "max_batch_size: 4\ndynamic_batching { default_queue_policy { default_timeout_microseconds: 5000000 } }\n"
    limit = 'parameters { key: "naiad.execution_timeout" value { string_value: "20" } }\n'
    write_obey(repository, config=config + limit)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with changed_environment(PYTHONPATH=paths), ServerProcess(repository) as server, Load(server) as load:
        load.wait_for_answers(settings.count(2000, 50_000), timeout_s=120)
        lost = int(metrics_of(server).get("naiad_worker_lost_total", 0))
    wrong = [*load.ledger.wrong(), *([f"{lost} workers were given up"] if lost else [])]
    wrong += [f"spurious: {text}" for text in list(load.ledger.texts)[:3]]
    failed = load.ledger.texts.total()
    figure = f"{load.ledger.sent:,} inferences while the clock jumps: {failed} failed, {lost} workers lost"
    return Finding(figure, wrong, list(load.ledger.texts))


def shared_memory_full(settings: Settings) -> Finding:
    """S33b: /dev/shm is full while models write outputs into a client's region there."""
    repository = settings.repository()
    write_obey(repository)
    write_echo(repository)
    texts: list[str] = []
    try:
        server = ServerProcess(repository, module="tests.faults.small_shared_memory")
        server.start()
    except ServerFailed as error:
        raise Skipped("a server may not have a /dev/shm of its own here") from error
    with contextlib.closing(_Stopping(server)), Load(server, http=4, grpc=4) as load:
        folder = Path(f"/proc/{server.pid}/root/dev/shm")
        large = 200_000
        with (folder / "naiad_region").open("wb") as file:
            file.truncate(2 * large)  # holes: pages are taken when they are written
        where = f'{{"key": "/naiad_region", "offset": 0, "byte_size": {2 * large}}}'
        assert post(server, "/v2/systemsharedmemory/region/r/register", where)[0] == 200
        (folder / "filler").write_bytes(bytes(_free_byte_size(folder)))
        body = _region_body({"shared_memory_region": "r", "shared_memory_byte_size": large}, large)
        for _ in range(settings.count(20, 200)):
            status, text = post(server, "/v2/models/echo/infer", body)
            texts.append(f"{status} {text}")
        load.wait_for_answers(300)
        (folder / "filler").unlink()
        wait_for(lambda: post(server, "/v2/models/echo/infer", body)[0] == 200)
        lost = int(metrics_of(server).get("naiad_worker_lost_total", 0))
    refused = [text for text in texts if not text.startswith("200")]
    wrong = [*load.ledger.wrong()]
    wrong += [f"{load.ledger.texts.total()} inferences of others failed"] if load.ledger.texts else []
    wrong += [] if refused else ["writing into a full region had no error"]
    wrong += [f"{lost} workers died"] if lost > 1 else []
    figure = (
        f"{len(texts)} requests with an output in a region without memory: {len(refused)} errors, {lost} workers lost; "
        f"{load.ledger.texts.total()} of {load.ledger.sent:,} inferences of others failed; served when there is room"
    )
    return Finding(figure, wrong, [*texts, *load.ledger.texts])


class _Stopping:
    """Stops a server that was started by hand."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def close(self) -> None:
        self._server.stop()


def _region_body(there: dict[str, object], byte_size: int) -> str:
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [byte_size], "parameters": there}
    output = {"name": "OUTPUT0", "parameters": {**there, "shared_memory_offset": byte_size}}
    return json.dumps({"inputs": [tensor], "outputs": [output]})
