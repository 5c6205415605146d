"""A real Triton to compare with, and NVIDIA's perf_analyzer. Pip fetches both once into a cache folder.

Triton's own `tritonserver` (2.51, CPU) and its Python backend come with the `nvidia-pytriton` wheel, and perf_analyzer
with an older `tritonclient` wheel. This needs pip, dpkg and apt-get (Debian or Ubuntu), and a CPython 3.8 to 3.12 with
a shared libpython. Nothing is installed outside of the cache folder.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path(os.environ.get("NAIAD_BENCH_CACHE", Path.home() / ".cache" / "naiad-bench"))
SERVER_WHEEL = "nvidia-pytriton==0.7.0"
CLIENT_WHEEL = "tritonclient==2.41.0"  # the last that carries perf_analyzer for glibc 2.36
NUMPY = "numpy==1.26.4"  # this Triton's Python backend reads arrays of NumPy 2 wrongly

#: Names a folder with a C++ ONNX Runtime backend for this Triton. The wheel has none.
ONNX_BACKEND = "NAIAD_BENCH_ONNX_BACKEND"
_ONNX_LIBRARY = "libtriton_onnxruntime.so"

START_TIMEOUT_S = 60


class NotAvailable(Exception):
    """Triton or perf_analyzer is not available on this machine; the message says why."""


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"pip {' '.join(arguments)} failed: {done.stderr.strip().splitlines()[-1:]}")


def server_root() -> Path:
    """Return the folder of the unpacked server wheel. It is fetched if it is not there (about 200 MB)."""
    root = CACHE / SERVER_WHEEL.replace("==", "-")
    if not root.exists():
        staging = root.with_suffix(".part")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _pip("download", "-q", "--no-deps", "-d", str(staging), SERVER_WHEEL)
        wheel = next(staging.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staging)
        wheel.unlink()
        for path in (staging / "pytriton/tritonserver").rglob("*"):
            if path.is_file() and (path.parent.name == "bin" or path.name.endswith("_stub")):
                path.chmod(0o755)
        staging.rename(root)
    _install_stub(root)
    return root


def _install_stub(root: Path) -> None:
    """Copy the Python backend's stub for this interpreter to where the server looks for it."""
    server = root / "pytriton/tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise NotAvailable(f"the wheel has no Python backend for CPython {version}")
    target = server / "backends/python/triton_python_backend_stub"
    target.unlink(missing_ok=True)
    shutil.copy(stub, target)
    target.chmod(0o755)
    libraries = root / "pytriton/nvidia_pytriton.libs"  # the stub's rpath is relative to its own folder
    if not libraries.exists():
        libraries.symlink_to(root / "nvidia_pytriton.libs")


def onnx_backend() -> Path:
    """Return the folder of Triton's C++ ONNX Runtime backend. Raises `NotAvailable`, with what to do."""
    named = os.environ.get(ONNX_BACKEND, "")
    folder = Path(named) if named else server_root() / "pytriton/tritonserver/backends/onnxruntime"
    if (folder / _ONNX_LIBRARY).exists():
        return folder
    raise NotAvailable(
        f"there is no {_ONNX_LIBRARY} in {folder}: build it from NVIDIA's sources (onnxruntime_backend, branch r24.10),"
        f" and put it there with its libonnxruntime.so, or name their folder in {ONNX_BACKEND}"
    )


@contextlib.contextmanager
def _backends(onnx: Path | None) -> Iterator[Path]:
    """Yield a folder with the backends of the wheel, and one for ONNX if it is given."""
    own = server_root() / "pytriton/tritonserver/backends"
    if onnx is None or onnx.parent == own:
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="naiad-backends-") as folder:
        for name, target in (("python", own / "python"), ("onnxruntime", onnx.resolve())):
            Path(folder, name).symlink_to(target)
        yield Path(folder)


def packages(*requirements: str) -> Path:
    """Return a folder with packages that models of Triton import. They are fetched if they are not there.

    Raises `NotAvailable`.
    """
    name = "-".join(re.sub(r"[=<>]+", "-", each) for each in requirements)
    target = CACHE / f"{name}-{sys.implementation.cache_tag}"
    if not target.exists():
        _pip("install", "-q", "--target", str(target), *requirements)
    return target


@contextlib.contextmanager
def triton(
    models: Path,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    *flags: str,
    start_timeout_s: float = START_TIMEOUT_S,
    onnx_backend: Path | None = None,
) -> Iterator[int]:
    """Serve `models` with Triton on loopback while the block runs. Yields the process id when it is ready.

    `onnx_backend` is what the function of that name returns, for models of the C++ ONNX Runtime backend.
    """
    root = server_root()
    server = root / "pytriton/tritonserver"
    with _backends(onnx_backend) as backends:
        command = [
            str(server / "bin/tritonserver"), f"--model-repository={models}", f"--backend-directory={backends}",
            f"--cache-directory={server / 'caches'}", f"--http-port={http_port}", f"--grpc-port={grpc_port}",
            f"--metrics-port={metrics_port}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", *flags,
        ]  # fmt: skip
        libraries = f"{root / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
        process = subprocess.Popen(
            command,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            cwd=packages(NUMPY),  # the stub ignores PYTHONPATH and looks in its working folder first
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_ready(process, http_port, start_timeout_s)
            yield process.pid
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # The Python workers of a Triton that has crashed do not end with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait_ready(process: subprocess.Popen[bytes], http_port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.02)
        finally:
            connection.close()
    raise NotAvailable("the real Triton did not start")


def perf_analyzer() -> tuple[Path, dict[str, str]]:
    """Return perf_analyzer's path and the environment that it needs. It is fetched if it is not there."""
    folder = CACHE / "perf_analyzer-2.41.0"
    binary = folder / "perf_analyzer"
    if not binary.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise NotAvailable("perf_analyzer needs a library of Debian, and there is no apt-get on this machine")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _pip("download", "-q", "--no-deps", "--only-binary=:all:", "--platform=manylinux1_x86_64", "-d", str(folder),
             CLIENT_WHEEL)  # fmt: skip
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            member = next(name for name in archive.namelist() if name.endswith("bin/perf_analyzer"))
            (folder / "part").write_bytes(archive.read(member))
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        subprocess.run(["apt-get", "download", "-qq", "libb64-0d"], cwd=folder, check=True, capture_output=True)
        subprocess.run(["dpkg", "-x", str(next(folder.glob("libb64*.deb"))), str(folder)], check=True)
        for library in (server_root() / "nvidia_pytriton.libs").glob("libcudart-*.so.12*"):
            (folder / "libcudart.so.12").symlink_to(library)
        (folder / "part").chmod(0o755)
        (folder / "part").rename(binary)
    libraries = [str(folder), *(str(path.parent) for path in folder.rglob("libb64.so.0d"))]
    return binary, {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
