"""Triton with its Python backend, and with its C++ ONNX Runtime backend where that is built (`bench/triton.py`)."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from bench import onnx_models as models
from bench.peers.naiad import write_digits, write_python_models
from bench.peers.peer import NotInstalled, Peer, Served, Setup, v2_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, GRPC, MEBIBYTE, V2_BINARY, V2_JSON
from bench.triton import NotAvailable, server_root, triton

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A folder with a built `libtriton_onnxruntime.so`, for a cache that has none.
BACKEND_VARIABLE = "NAIAD_BENCH_ONNX_BACKEND"
_BACKEND_FILE = "libtriton_onnxruntime.so"


@contextlib.contextmanager
def serve_python(setup: Setup) -> Iterator[Served]:
    repository = setup.folder / "models"
    write_python_models(repository, setup.workers)
    with _serve(setup, repository) as served:
        yield served


@contextlib.contextmanager
def serve_onnx(setup: Setup) -> Iterator[Served]:
    _require_onnx_backend()
    repository = setup.folder / "models"
    repository.mkdir()
    write_onnx_models(repository, setup.folder / "written", setup.workers)
    write_digits(repository, setup.workers)
    with _serve(setup, repository) as served:
        yield served


@contextlib.contextmanager
def _serve(setup: Setup, repository: Path) -> Iterator[Served]:
    try:
        with triton(repository, setup.http_port, setup.grpc_port, setup.metrics_port) as pid:
            yield Served(setup.http_port, setup.grpc_port, pid)
    except NotAvailable as error:
        raise NotInstalled(str(error)) from None


def _require_onnx_backend() -> None:
    """Let the server find the C++ backend. Raises `NotInstalled` if it is not built."""
    try:
        backends = server_root() / "pytriton/tritonserver/backends"
    except NotAvailable as error:
        raise NotInstalled(str(error)) from None
    target = backends / "onnxruntime"
    built = os.environ.get(BACKEND_VARIABLE, "")
    if not target.exists() and built:
        target.unlink(missing_ok=True)
        target.symlink_to(built)
    if not (target / _BACKEND_FILE).exists():
        raise NotInstalled(f"the C++ backend is not built; {BACKEND_VARIABLE} names a folder with {_BACKEND_FILE}")


def write_onnx_models(root: Path, written: Path, workers: int) -> None:
    """Write `add_sub` and `identity` as ONNX graphs into `root`, by way of the folder `written`."""
    models.write_onnx_models(written)
    for name in (ADD_SUB, MEBIBYTE):
        (written / f"{name}_onnx").rename(root / name)
        config = root / name / "config.pbtxt"
        config.write_text(config.read_text().replace("count: 1", f"count: {workers}"))


_SOURCE = "https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/optimization.html"

PYTHON = Peer(
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

ONNX = Peer(
    name="triton-onnx",
    title="Triton, C++ ONNX",
    settings="2.51, all three models as ONNX graphs in its process, one thread each, instance_group count N",
    source=_SOURCE,
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, DIGITS: V2_JSON, MEBIBYTE: V2_BINARY}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    serve=serve_onnx,
    analyzer=(),
)
