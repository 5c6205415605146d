"""Our own server, started as everybody starts it."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from bench.models import ADD_SUB as ADD_SUB_SOURCE
from bench.models import FOUR_TENSORS, IDENTITY, one_tensor, write_python_model
from bench.peers.peer import NotInstalled, PeerServer, ServedPeer, Setup, v2_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, GRPC, MEBIBYTE, V2_BINARY, V2_JSON
from bench.server import ServerFailed, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADD_SUB_CONFIG = "max_batch_size: 0\n" + FOUR_TENSORS
IDENTITY_CONFIG = (
    "max_batch_size: 64\n" + one_tensor("input", "INPUT0", "TYPE_FP32", "[-1]")
    + one_tensor("output", "OUTPUT0", "TYPE_FP32", "[-1]")
)  # fmt: skip


def write_python_models(root: Path, workers: int) -> None:
    """Write `add_sub` and `identity` in Python, which Triton runs too."""
    write_python_model(root / ADD_SUB, ADD_SUB_CONFIG, ADD_SUB_SOURCE, workers)
    write_python_model(root / MEBIBYTE, IDENTITY_CONFIG, IDENTITY, workers)


def write_digits(root: Path, workers: int) -> None:
    """Write the demo's classifier with that number of instances."""
    folder = root / DIGITS
    shutil.copytree(DIGITS_MODEL.parents[1], folder)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", f"count: {workers}"))


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[ServedPeer]:
    write_python_models(setup.folder, setup.workers)
    write_digits(setup.folder, setup.workers)
    try:
        with ServerProcess(setup.folder) as server:
            yield ServedPeer(server.http_port, server.grpc_port, server.pid)
    except ServerFailed as error:
        raise NotInstalled(str(error).strip().rpartition("\n")[2]) from None


PEER = PeerServer(
    name="naiad",
    title="Naiad",
    settings="defaults; add_sub and identity in Python, digits in ONNX Runtime, instance_group count N; 1 MiB as binary"
    " tensors",
    source="docs/python-models.md, docs/onnx.md",
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, DIGITS: V2_JSON, MEBIBYTE: V2_BINARY}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    serve=serve,
    analyzer=(),
)
