"""Triton with its Python backend, and with its C++ ONNX Runtime backend where that is built (`bench/triton.py`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench import models
from bench.peers.peer import NotInstalled, PeerServer, ServedPeer, Setup, v2_endpoints
from bench.peers.servers.naiad import write_digits, write_python_models
from bench.peers.workloads import ADD_SUB, DIGITS, GRPC, MEBIBYTE, V2_BINARY, V2_JSON
from bench.triton import NotAvailable, onnx_backend, triton

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def serve_python(setup: Setup) -> Iterator[ServedPeer]:
    repository = setup.folder / "models"
    write_python_models(repository, setup.workers)
    with _serve(setup, repository, None) as served:
        yield served


@contextlib.contextmanager
def serve_onnx(setup: Setup) -> Iterator[ServedPeer]:
    try:
        backend = onnx_backend()
    except NotAvailable as error:
        raise NotInstalled(str(error)) from None
    repository = setup.folder / "models"
    repository.mkdir()
    write_onnx_models(repository, setup.folder / "written", setup.workers)
    write_digits(repository, setup.workers)
    with _serve(setup, repository, backend) as served:
        yield served


@contextlib.contextmanager
def _serve(setup: Setup, repository: Path, backend: Path | None) -> Iterator[ServedPeer]:
    ports = setup.http_port, setup.grpc_port, setup.metrics_port
    try:
        with triton(repository, *ports, onnx_backend=backend) as pid:
            yield ServedPeer(setup.http_port, setup.grpc_port, pid)
    except NotAvailable as error:
        raise NotInstalled(str(error)) from None


def write_onnx_models(root: Path, written: Path, workers: int) -> None:
    """Write `add_sub` and `identity` as ONNX graphs into `root`, by way of the folder `written`."""
    models.write_onnx_models(written)
    for name in (ADD_SUB, MEBIBYTE):
        (written / f"{name}_onnx").rename(root / name)
        config = root / name / "config.pbtxt"
        config.write_text(config.read_text().replace("count: 1", f"count: {workers}"))


_SOURCE = "https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/optimization.html"

PYTHON = PeerServer(
    name="triton",
    title="Triton, Python",
    settings="2.51, Naiad's files for add_sub and identity, instance_group count N; no digits (ONNX models have the"
    " C++ backend)",
    source=_SOURCE,
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, MEBIBYTE: V2_BINARY}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    serve=serve_python,
    analyzer=(),
)

ONNX = PeerServer(
    name="triton-onnx",
    title="Triton, C++ ONNX",
    settings="2.51, all three models as ONNX graphs in its process, one thread each, instance_group count N",
    source=_SOURCE,
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, DIGITS: V2_JSON, MEBIBYTE: V2_BINARY}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    serve=serve_onnx,
    analyzer=(),
)
