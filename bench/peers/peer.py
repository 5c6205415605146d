"""A peer: a server to compare with, what it is asked, and how it is started."""

from __future__ import annotations

from contextlib import AbstractContextManager  # noqa: TC003 - msgspec reads the types of fields
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING

import msgspec

from bench.light import MODEL_INFER
from bench.peers.workloads import GRPC, BodyFormat

if TYPE_CHECKING:
    from collections.abc import Callable


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
