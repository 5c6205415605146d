"""Starts a peer, waits until each of its models responds correctly, and ends all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import h2.exceptions
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, StreamTerminatedError

from bench.machine import children_of, stat_fields
from bench.peers.peer import NotInstalled, PeerEndpoint, PeerServer, ServedPeer, Setup, environment
from bench.peers.workloads import PeerMessage, WrongResponse
from bench.server import free_ports
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Ray Serve starts a cluster, which takes a quarter of a minute on two cores.
START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 20
RESPONSE_TIMEOUT_S = 20


@contextlib.contextmanager
def serving(peer: PeerServer, workers: int) -> Iterator[ServedPeer]:
    """Serve with a peer while the block runs. All its models have given correct responses when it begins.

    Raises `NotInstalled`, also where the peer does not start or responds wrongly.
    """
    http_port, grpc_port, metrics_port = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="naiad-peer-", ignore_cleanup_errors=True) as folder:
        setup = Setup(Path(folder), http_port, grpc_port, metrics_port, workers)
        if peer.serve is None:
            with _installed(peer, setup) as served:
                yield served
        else:
            with peer.serve(setup) as served:
                _wait_until_correct(peer, served, lambda: "")
                yield served


@contextlib.contextmanager
def _installed(peer: PeerServer, setup: Setup) -> Iterator[ServedPeer]:
    """Write the files of a peer's service, and run its command in a session of its own."""
    assert peer.service is not None
    own = environment(peer)
    service = peer.service(setup)
    for name, text in service.files.items():
        path = setup.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    log = setup.folder / "log"
    programs = f"{own.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    variables = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [own.program(service.command[0]), *service.command[1:]],
            cwd=setup.folder,
            env={**variables, "PATH": programs, **service.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    served = ServedPeer(setup.http_port, setup.grpc_port, process.pid)
    try:
        _wait_until_correct(peer, served, lambda: _last_lines(log) if process.poll() is not None else "")
        yield served
    finally:
        end(process)


def _wait_until_correct(peer: PeerServer, served: ServedPeer, ended: Callable[[], str]) -> None:
    """Ask until all responses are correct. `ended` returns why they never will be, or nothing."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            check(peer, served)
        except (OSError, WrongResponse) as error:
            if reason := ended():
                raise NotInstalled(f"it has ended: {reason}") from None
            if time.monotonic() > deadline:
                raise NotInstalled(f"it does not serve after {START_TIMEOUT_S} s: {error}") from None
            time.sleep(0.1)
        else:
            return


def _last_lines(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-3:]) or "it printed nothing"


def check(peer: PeerServer, served: ServedPeer) -> None:
    """Ask each model once. Raises `WrongResponse`, and `OSError` where nothing listens."""
    for endpoints in (peer.endpoints, peer.grpc):
        for model, endpoint in endpoints.items():
            request = endpoint.body.request(model)
            endpoint.body.check(model, _respond(endpoint, request, served))


def _respond(endpoint: PeerEndpoint, request: PeerMessage, served: ServedPeer) -> PeerMessage:
    if endpoint.is_grpc:
        return asyncio.run(_respond_grpc(endpoint.path, request, served.grpc_port))
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=RESPONSE_TIMEOUT_S)
    try:
        connection.request("POST", endpoint.path, request.body, request.headers)
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise WrongResponse(repr(error)) from None
    finally:
        connection.close()
    if response.status != 200:
        raise WrongResponse(f"{endpoint.path}: status {response.status}: {body[:200]!r}")
    return PeerMessage({name.lower(): value for name, value in response.getheaders()}, body)


async def _respond_grpc(path: str, request: PeerMessage, port: int) -> PeerMessage:
    channel = Channel("127.0.0.1", port)
    try:
        async with (
            asyncio.timeout(RESPONSE_TIMEOUT_S),
            channel.request(path, Cardinality.UNARY_UNARY, pb.ModelInferRequest, pb.ModelInferResponse) as stream,
        ):
            await stream.send_message(pb.ModelInferRequest.FromString(request.body[5:]), end=True)
            message = await stream.recv_message()
    except (GRPCError, StreamTerminatedError, h2.exceptions.ProtocolError, TimeoutError) as error:
        raise WrongResponse(f"{path}: {error!r}") from None
    finally:
        channel.close()
    if message is None:
        raise WrongResponse(f"{path}: no message")
    return PeerMessage({}, b"\0\0\0\0\0" + message.SerializeToString())


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it has started: politely, and then what is left of it."""
    before = {pid: _start_time(pid) for pid in [process.pid, *children_of(process.pid)]}
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    # Processes that lost their parent are found by their session, those with sessions of their own by their number.
    left = [pid for pid, start_time in before.items() if start_time and _start_time(pid) == start_time]
    for pid in {*left, *_session(process.pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _start_time(pid: int) -> str:
    """Return when a process was started, in ticks of the system; empty for one that has ended."""
    return (stat_fields(pid) or [""] * 20)[19]


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if stat_fields(pid)[3:4] == [str(leader)]]
