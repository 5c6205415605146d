"""Clients that are not Python, and NVIDIA's perf_analyzer, against a server. Each runs where its tools are installed.

Node needs `make clients` once for its gRPC packages; Go takes Debian's packages of gRPC, without any network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess
from bench.triton import CACHE, NotAvailable, perf_analyzer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "clients"
MODELS = ROOT / "tests/conformance/models"
#: Where Debian puts the sources of Go libraries.
GO_LIBRARIES = Path("/usr/share/gocode")
PROTOS = ("kernel/config/model_config.proto", "protocols/grpc/grpc_service.proto")

EVERYWHERE = {"metadata": ["A", "B"], "id": "7", "sum": [2, 4, 6, 8]}
UNKNOWN = "Request for unknown model: 'nothing' is not found"
HTTP = {**EVERYWHERE, "ready": 200, "binary": [5, 5, 5, 5], "refused": [404, UNKNOWN]}
GRPC = {**EVERYWHERE, "ready": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    loaded = ("--load-model=sum", "--load-model=tokens")
    with ServerProcess(MODELS, "--model-control-mode=explicit", *loaded) as running:
        yield running


def needs(*programs: str) -> None:
    """Skip the test where one of `programs` is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def run(*command: str | Path, **more: Any) -> str:
    """Return what a program prints; its own complaints are the message of a failure."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_node_over_http(server: ServerProcess) -> None:
    needs("node")
    if int(run("node", "--version").lstrip("v").partition(".")[0]) < 18:
        pytest.skip("node is older than 18 and has no fetch")
    told = json.loads(run("node", SOURCES / "node/http.js", server.url))
    assert told == {**HTTP, "encoding": "gzip", "tokens": ["node 0", "node 1", "node 2"]}


def test_node_over_grpc(server: ServerProcess) -> None:
    needs("node")
    if not (SOURCES / "node/node_modules/@grpc/grpc-js").exists():
        pytest.skip("the packages for Node are not installed: `make clients` does it")
    told = json.loads(run("node", SOURCES / "node/grpc.js", server.grpc_url, ROOT))
    assert told == {**GRPC, "refused": ["NOT_FOUND", UNKNOWN], "tokens": ["node 0", "node 1", "node 2"]}


def test_go_over_http(server: ServerProcess, tmp_path: Path) -> None:
    needs("go")
    run("go", "build", "-o", tmp_path / "client", SOURCES / "go_http/main.go", env={**os.environ, "GO111MODULE": "off"})
    assert json.loads(run(tmp_path / "client", server.url)) == {**HTTP, "tokens": ["go 0", "go 1", "go 2"]}


def test_go_over_grpc(server: ServerProcess, tmp_path: Path) -> None:
    needs("go", "protoc", "protoc-gen-go")
    if not (GO_LIBRARIES / "src/google.golang.org/grpc").exists():
        pytest.skip("golang-google-grpc-dev is not installed")
    package = tmp_path / "src/naiad/inference"
    package.mkdir(parents=True)
    options = ",".join(["plugins=grpc", *(f"M{proto}=naiad/inference" for proto in PROTOS)])
    command = ["protoc", f"-I{ROOT}", f"--go_out={options}:{tmp_path}", *PROTOS]
    generated = subprocess.run(command, capture_output=True, text=True, check=False)
    if "plugins are not supported" in generated.stderr:
        pytest.skip("protoc-gen-go is newer than Debian's gRPC: it needs protoc-gen-go-1-3")
    assert generated.returncode == 0, generated.stderr
    for proto in PROTOS:
        shutil.move((tmp_path / proto).with_suffix(".pb.go"), package)
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": f"{tmp_path}:{GO_LIBRARIES}"}
    run("go", "build", "-o", tmp_path / "client", SOURCES / "go_grpc/main.go", env=environment)
    told = json.loads(run(tmp_path / "client", server.grpc_url))
    assert told == {**GRPC, "refused": ["NotFound", UNKNOWN], "tokens": ["go 0", "go 1", "go 2"]}


@pytest.mark.parametrize(("protocol", "extra"), [("http", []), ("grpc", []), ("grpc", ["--shared-memory", "system"])])
def test_perf_analyzer(server: ServerProcess, protocol: str, extra: list[str]) -> None:
    if not (CACHE / "perf_analyzer-2.41.0").exists():
        pytest.skip("perf_analyzer has not been fetched: `make bench` does it")
    try:
        binary, environment = perf_analyzer()
    except NotAvailable as error:
        pytest.skip(str(error))
    address = server.url if protocol == "http" else server.grpc_url
    load = ("--concurrency-range", "2", "--measurement-mode", "count_windows", "--measurement-request-count", "50")
    told = run(binary, "-m", "sum", "-i", protocol, "-u", address, *load, "-s", "999", *extra, env=environment)
    assert "Throughput" in told
    assert "Failed" not in told
