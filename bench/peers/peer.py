"""A peer: a server to compare with, what it is asked, and how it is started.

Each peer has an environment of its own from the package index, in the cache folder, made once. Nothing is installed
anywhere else. `installed.json` in the environment is written last: what an interrupted installation leaves is made
anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager  # noqa: TC003 - msgspec reads the types of fields
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING

import msgspec

from bench.light import MODEL_INFER
from bench.peers.workloads import GRPC, BodyFormat
from bench.triton import CACHE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class NotInstalled(Exception):
    """A peer cannot be installed or started on this machine; the message says why."""


class Setup(msgspec.Struct, frozen=True):
    """One start of a peer: an empty folder for its files, ports on loopback, and how many workers it has."""

    folder: Path
    http_port: int
    grpc_port: int
    metrics_port: int
    workers: int


class ServedPeer(msgspec.Struct, frozen=True):
    """A peer that serves: its ports, and its main process. All its processes are descendants of that one."""

    http_port: int
    grpc_port: int
    pid: int


class Service(msgspec.Struct, frozen=True):
    """Files, by name, in the folder where the command is run, and more variables of its environment.

    The first word of the command is `python`, or a program that was installed with the peer.
    """

    files: dict[str, str]
    command: list[str]
    environment: dict[str, str] = {}


class PeerEndpoint(msgspec.Struct, frozen=True):
    """Where a model is asked: a path, and how bodies are written."""

    path: str
    body: BodyFormat

    @property
    def is_grpc(self) -> bool:
        return self.body is GRPC


class PeerServer(msgspec.Struct, frozen=True):
    """A server to compare with.

    `endpoints` are by model, and `grpc` those that are asked over gRPC as well. `settings` is one line about what was
    set, and `source` the page of the peer's documentation that says so. A peer from the package index has
    `requirements`, of which the first is the peer itself, and a `service`; other peers have `serve`, which may raise
    `NotInstalled`.
    """

    name: str
    title: str
    settings: str
    source: str
    endpoints: dict[str, PeerEndpoint]
    grpc: dict[str, PeerEndpoint] = {}
    requirements: tuple[str, ...] = ()
    service: Callable[[Setup], Service] | None = None
    serve: Callable[[Setup], AbstractContextManager[ServedPeer]] | None = None
    #: perf_analyzer's options for this peer; None if it cannot measure it. It needs Triton's model configuration.
    analyzer: tuple[str, ...] | None = None


def v2_endpoints(body: dict[str, BodyFormat]) -> dict[str, PeerEndpoint]:
    """Return endpoints of the KServe v2 protocol for models and how their bodies are written."""
    return {
        model: PeerEndpoint(MODEL_INFER if each is GRPC else f"/v2/models/{model}/infer", each)
        for model, each in body.items()
    }


def plain_endpoints(body: dict[str, BodyFormat]) -> dict[str, PeerEndpoint]:
    """Return endpoints whose path is the name of the model."""
    return {model: PeerEndpoint(f"/{model}", each) for model, each in body.items()}


FOLDER = CACHE / "peers"

INSTALL_TIMEOUT_S = 900


class Environment(msgspec.Struct, frozen=True):
    """An environment: its folder, and the versions of the packages that the peer asked for."""

    folder: Path
    versions: dict[str, str]

    def program(self, name: str) -> str:
        """Return the path of a program that was installed, for example `python`."""
        return str(self.folder / "bin" / name)


def environment(peer: PeerServer) -> Environment:
    """Return the environment of a peer. It is made if it is not there. Raises `NotInstalled`."""
    folder = FOLDER / peer.name
    record = folder / "installed.json"
    wanted = sorted(peer.requirements)
    if record.exists():
        installed = msgspec.json.decode(record.read_bytes(), type=dict[str, list[str]])
        if installed["requirements"] == wanted:
            return Environment(folder, _versions(installed["frozen"], peer.requirements))
    frozen = _install(folder, wanted)
    record.write_bytes(msgspec.json.encode({"requirements": wanted, "frozen": frozen}))
    return Environment(folder, _versions(frozen, peer.requirements))


def remove_environment(peer: PeerServer) -> None:
    """Remove the environment of a peer, so that its newest version is installed the next time."""
    shutil.rmtree(FOLDER / peer.name, ignore_errors=True)


def _install(folder: Path, requirements: Sequence[str]) -> list[str]:
    python = folder / "bin" / "python"
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-q", *requirements])
    return _run([*pip, "freeze"]).splitlines()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"the installation did not end within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise NotInstalled(lines[-1].strip() if lines else f"{command[-1]} ended with {done.returncode}")
    return done.stdout


def _versions(frozen: Sequence[str], requirements: Sequence[str]) -> dict[str, str]:
    """Return the versions of the named packages in lines of `pip freeze`, in the order of the requirements."""
    found = {_normal(name): version for name, _, version in (line.partition("==") for line in frozen) if version}
    names = [re.split(r"[\[<>=]", requirement)[0] for requirement in requirements]
    return {name: found[_normal(name)] for name in names if _normal(name) in found}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
