"""Hostile connections and requests, and what a healthy client notices: S19 to S22, S26 to S29, S32 to S34."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.checkout import ROOT
from bench.contenders import OURS, Contender
from bench.heavy.attacker import Order, heavy_rows
from bench.heavy.command import ATTACK_TIMEOUT_S, BUDGET_BYTE_SIZE, FLAGS, our_flags
from bench.heavy.healthy import Waits
from bench.heavy.measurement import Attackers, healthy_client, measure_row
from bench.heavy.report import judge
from bench.machine import memory_of
from bench.models import write_echoes
from bench.server import ServerProcess, wait_for
from tests.faults.health import watched
from tests.faults.load import Load
from tests.faults.models import write_echo, write_healthy, write_obey
from tests.faults.requests import ask, longest, post, waits_of
from tests.faults.row import Finding, Settings, at_most
from tests.faults.soak.holdings import kinds_of_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
FLOODER = "tests.end_to_end.floods.flooder"


def flood(*kinds: str) -> Callable[[Settings], Finding]:
    """Return the measurement of floods: one after another, while a healthy client uses both protocols."""
    return functools.partial(_flood, kinds)


def _flood(kinds: tuple[str, ...], settings: Settings) -> Finding:
    seconds = settings.count(3, 20)
    repository = settings.repository()
    write_healthy(repository)
    write_echo(repository, "attacked")
    parts: list[str] = []
    wrong: list[str] = []
    with ServerProcess(repository) as server:
        ports = {"http": server.http_port, "grpc": server.grpc_port}
        with healthy_client(ports) as healthy:
            before = waits_of(healthy, 2)
            for kind in kinds:
                memory = memory_of(server.pid).private
                command = [sys.executable, "-m", FLOODER, kind, str(server.grpc_port)]
                with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as flooder:
                    try:
                        assert flooder.stdout is not None
                        flooder.stdout.readline()
                        found = waits_of(healthy, seconds)
                        if flooder.poll() is not None:
                            wrong.append(f"{kind}: the flood has ended by itself")
                    finally:
                        flooder.kill()
                grown = (memory_of(server.pid).private - memory) / MIB
                wrong += [f"{kind}: {text}" for text in found.failures[:2]]
                wrong += at_most(f"{kind}: p99 of others", found.p99_ms, max(50, 3 * before.p99_ms), " ms")
                wrong += at_most(f"{kind}: growth", grown, 64, " MiB")
                parts.append(f"{kind.replace('_', ' ')} {found.p99_ms:.0f} ms, {grown:+.0f} MiB")
    return Finding(f"p99 of others before {before.p99_ms:.0f} ms; meanwhile, and memory: {'; '.join(parts)}", wrong)


def heavy(*names: str) -> Callable[[Settings], Finding]:
    """Return the measurement of single heavy requests, which are rows of `make bench ARGS=heavy`."""
    return functools.partial(_heavy, names)


def _heavy(names: tuple[str, ...], settings: Settings) -> Finding:
    body = (60 if settings.full else 16) * MIB
    repository = settings.repository()
    write_echoes(repository, builtin=True)
    rows = {row.name: row for row in heavy_rows()}
    slowest = longest_ms = growth = 0.0
    wrong: list[str] = []
    with Attackers() as attackers:
        for name in names:
            row = rows[name]
            flags = (*FLAGS, *our_flags(BUDGET_BYTE_SIZE))
            with ServerProcess(repository, *flags) as server:
                ports = {"http": server.http_port, "grpc": server.grpc_port}
                contender = Contender(OURS, ports, server.pid)
                with healthy_client(ports) as healthy:
                    order = Order(row.name, body, ports[row.protocol], ATTACK_TIMEOUT_S)
                    sample = measure_row(row, order, contender, attackers, healthy, least_s=1.0)
            verdict = judge(row, BUDGET_BYTE_SIZE, [sample])
            wrong += [f"{name}: {text}" for text in verdict.wrong if "longest" in text or "is not in" in text
                      or "status" in text or "failed" in text]  # fmt: skip
            wrong += at_most(f"{name}: p99", sample.p99_ms, 50, " ms")
            slowest, longest_ms = max(slowest, sample.p99_ms), max(longest_ms, sample.longest_ms)
            growth = max(growth, sample.growth.total / body)
    figure = (
        f"{len(names)} requests of {body // MIB} MiB: p99 of others {slowest:.0f} ms at most, longest wait "
        f"{longest_ms:.0f} ms, memory {growth:.1f} times the body at most"
    )
    return Finding(figure, wrong)


def slow_clients(settings: Settings) -> Finding:
    """S26: five hundred connections that send a head, a body or nothing, byte by byte."""
    count = 500
    repository = settings.repository()
    write_healthy(repository)
    write_obey(repository)
    head = b"POST /v2/models/obey/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    begun = [head, head + b"\r\n{", b""]
    sockets: list[socket.socket] = []
    with ServerProcess(repository) as server, healthy_client({"http": server.http_port}) as healthy:
        memory = memory_of(server.pid).private
        before = waits_of(healthy, 2)
        with contextlib.ExitStack() as stack:
            for number in range(count):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
                sock.sendall(begun[number % 3])
                sock.setblocking(False)
                sockets.append(sock)
            grown = (memory_of(server.pid).private - memory) / MIB
            began = time.monotonic()
            closed = set[socket.socket]()
            healthy.say()
            heads = sockets[::3]
            while time.monotonic() - began < 60 and not closed.issuperset(heads):
                for sock in sockets:
                    if sock not in closed and _is_closed(sock, trickle=b"x: y\r\n" if sock in heads[:50] else b""):
                        closed.add(sock)
                time.sleep(0.5)
            took_s = time.monotonic() - began
            healthy.say()
            waits = longest(msgspec.json.decode(healthy.line(), type=dict[str, Waits]))
    wrong = at_most("p99 of others", waits.p99_ms, max(50, 3 * before.p99_ms), " ms")
    wrong += at_most("memory of a connection", grown / count, 1.0, " MiB")
    left = len(set(heads) - closed)
    wrong += [f"{left} heads that are never ended were still open after a minute"] if left else []
    figure = (
        f"{count} connections with heads and bodies that do not end: p99 of others {waits.p99_ms:.0f} ms "
        f"(before {before.p99_ms:.0f}), {grown / count * 1024:.0f} KiB each; all unfinished heads "
        f"closed after {took_s:.0f} s"
    )
    return Finding(figure, wrong, waits.failures)


def _is_closed(sock: socket.socket, trickle: bytes) -> bool:
    try:
        if trickle:
            sock.send(trickle)
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def many_chunks(settings: Settings) -> Finding:
    """S29: bodies of a million chunks of one byte."""
    count = settings.count(10, 100)
    repository = settings.repository()
    write_obey(repository)
    body = b"1\r\nx\r\n" * 1_000_000
    statuses: set[str] = set()
    with ServerProcess(repository) as server, watched(server) as health:
        statuses.add(_chunks(server, body))
        memory = memory_of(server.pid).private
        health.counted()
        for _ in range(count):
            statuses.add(_chunks(server, body))
        waited = health.counted()
        grown = (memory_of(server.pid).private - memory) / MIB
    wrong = [] if statuses == {"400"} else [f"statuses {sorted(statuses)}"]
    wrong += [
        *at_most("growth", grown, 5, " MiB"),
        *at_most("health p99", waited.p99_ms, 50, " ms"),
        *waited.failures[:2],
    ]
    figure = f"{count} times: 400, private memory {grown:+.1f} MiB, health p99 {waited.p99_ms:.0f} ms"
    return Finding(figure, wrong)


def _chunks(server: ServerProcess, body: bytes) -> str:
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"POST /v2/models/obey/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        with contextlib.suppress(ConnectionError):
            return sock.recv(100)[9:12].decode()
    return "cut"


def registrations(settings: Settings) -> Finding:
    """S32: regions that are registered and unregistered, and registrations that are refused."""
    count = settings.count(1500, 10_000)
    repository = settings.repository()
    write_echo(repository)
    name = f"naiad_faults_{os.getpid()}"
    path = Path("/dev/shm", name)
    path.write_bytes(bytes(4096))
    keys = ["/no_such", "/../etc/passwd", "/", "", "/nul\0x", "/" + "a" * 300, "/a/b", "/naiad arena", "..", "/.",
            "//proc/self/mem"]  # fmt: skip
    accepted = 0
    try:
        with ServerProcess(repository) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
            texts: set[str] = set()

            def register(key: str, offset: int, byte_size: int, region: str) -> int:
                where = {"key": key, "offset": offset, "byte_size": byte_size}
                connection.request("POST", f"/v2/systemsharedmemory/region/{region}/register", json.dumps(where))
                response = connection.getresponse()
                texts.add(response.read().decode())
                return response.status

            for _ in range(20):
                register(f"/{name}", 0, 4096, "r")
                _unregister(connection)
            before, maps = kinds_of_descriptors(server.pid), _maps(server.pid)
            for number in range(count):
                if register(f"/{name}", 0, 4096, "r") != 200:
                    raise AssertionError("a right registration was refused")
                _unregister(connection)
                accepted += register(keys[number % len(keys)], 0, 4096, "bad") == 200
                accepted += register(f"/{name}", 4096 - number % 2 * 8192, 1 << (number % 63), "bad") == 200
            more, more_maps = kinds_of_descriptors(server.pid) - before, _maps(server.pid) - maps
            connection.close()
    finally:
        path.unlink(missing_ok=True)
    wrong = [f"{accepted} wrong registrations were accepted"] if accepted else []
    wrong += [f"descriptors: {dict(more)}"] if more else []
    wrong += at_most("mappings", more_maps, 4)
    figure = (
        f"{count:,} registrations and {2 * count:,} wrong ones: {accepted} of these accepted, descriptors "
        f"{more.total():+}, mappings {more_maps:+}"
    )
    return Finding(figure, wrong, sorted(texts - {""}))


def _unregister(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/v2/systemsharedmemory/region/r/unregister", "{}")
    response = connection.getresponse()
    response.read()
    assert response.status == 200


def _maps(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def harmed_regions(settings: Settings) -> Finding:
    """S33: the client shortens, punches, empties and removes its regions while models use them."""
    seconds = settings.count(8, 60)
    repository = settings.repository()
    write_echo(repository)
    write_obey(repository)
    name = f"naiad_faults_{os.getpid()}"
    path = Path("/dev/shm", name)
    size = 300_000
    stop = threading.Event()

    def harm() -> None:
        draw = random.Random(1)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                os.truncate(path, draw.choice([0, 4096, size]))
                time.sleep(draw.random() * 0.001)
                os.truncate(path, 2 * size)
            time.sleep(draw.random() * 0.01)

    statuses: dict[str, int] = {}
    path.write_bytes(bytes(2 * size))
    try:
        with ServerProcess(repository) as server, Load(server, http=2, grpc=2) as load:
            where = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": 2 * size})
            assert post(server, "/v2/systemsharedmemory/region/r/register", where)[0] == 200
            there = {"shared_memory_region": "r", "shared_memory_byte_size": size}
            tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [size], "parameters": there}
            output = {"name": "OUTPUT0", "parameters": {**there, "shared_memory_offset": size}}
            body = json.dumps({"inputs": [tensor], "outputs": [output]})
            thread = threading.Thread(target=harm)
            thread.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                status, text = post(server, "/v2/models/echo/infer", body)
                if status == 404:  # the server gives a region up that was shortened under a request
                    post(server, "/v2/systemsharedmemory/region/r/register", where)
                    continue
                key = str(status) if status == 200 else f"{status} {text[:150]}"
                statuses[key] = statuses.get(key, 0) + 1
            stop.set()
            thread.join()
            alive = ask(server, 3)[0] == 200
            deaths = server.log.count("signal 7") + server.log.count("SIGBUS")
    finally:
        stop.set()
        path.unlink(missing_ok=True)
    bad = [text for text in statuses if text.startswith("500") and "internal" in text]
    wrong = [*load.ledger.wrong(), *([] if alive else ["the server does not serve"]), *bad]
    figure = (
        f"{sum(statuses.values()):,} requests in {seconds} s: {statuses.get('200', 0):,} served, the others refused "
        f"with a text; the server lives, {deaths} lines about workers ended by SIGBUS; of others, "
        f"{load.ledger.texts.total()} of {load.ledger.sent:,} failed"
    )
    return Finding(figure, wrong, [*statuses, *load.ledger.texts])


def unregistered_in_use(settings: Settings) -> Finding:
    """S34: regions are unregistered, registered again and aliased while requests use them: exact bytes."""
    seconds = settings.count(5, 60)
    repository = settings.repository()
    write_echo(repository)
    end = time.monotonic() + seconds + 3
    mismatches: list[str] = []
    served = [0] * 8

    def client(number: int, server: ServerProcess) -> None:
        name = f"naiad_faults_{os.getpid()}_{number}"
        path = Path("/dev/shm", name)
        draw = random.Random(number)
        size = 70_000
        try:
            with path.open("w+b", buffering=0) as file:
                file.truncate(2 * size)
                while time.monotonic() < end:
                    content = draw.randbytes(size)
                    os.pwrite(file.fileno(), content + bytes(size), 0)
                    for region in (f"r{number}", f"alias{number}"):
                        where = {"key": f"/{name}", "offset": 0, "byte_size": 2 * size}
                        post(server, f"/v2/systemsharedmemory/region/{region}/register", json.dumps(where))
                    there = {"shared_memory_byte_size": size}
                    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [size],
                              "parameters": {**there, "shared_memory_region": f"r{number}"}}  # fmt: skip
                    output = {"name": "OUTPUT0", "parameters": {
                        **there, "shared_memory_region": f"alias{number}", "shared_memory_offset": size}}  # fmt: skip
                    body = json.dumps({"inputs": [tensor], "outputs": [output]})
                    other = threading.Thread(
                        target=post, args=(server, f"/v2/systemsharedmemory/region/r{number}/unregister")
                    )
                    if draw.random() < 0.5:
                        other.start()
                    status, text = post(server, "/v2/models/echo/infer", body)
                    if other.ident is not None:
                        other.join()
                    if status == 200:
                        served[number] += 1
                        if os.pread(file.fileno(), size, size) != content:
                            mismatches.append("other bytes")
                    elif "region" not in text:
                        mismatches.append(text[:150])
        finally:
            path.unlink(missing_ok=True)

    with ServerProcess(repository) as server:
        threads = [threading.Thread(target=client, args=(number, server)) for number in range(len(served))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: server.get("/v2/health/ready")[0] == 200)
    wrong = [f"{len(mismatches)} mismatches: {mismatches[0]}"] if mismatches else []
    return Finding(f"{sum(served):,} requests of {len(served)} clients: {len(mismatches)} mismatches", wrong)
