"""A server that serves, and `naiad ready`, have imported nothing that only others need.

The memory of a server and the time of its start count. A health check asks every few seconds, beside a server that has
work to do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Modules and packages that must not be in the kernel process, and what they are for.
FOREIGN = {
    "aiohttp.web": "servers with routes, static files, WebSockets and a command line",
    "argparse": "the other commands",
    "IPython": "programs that embed the server",
    "fsspec": "cloud repositories",
    "matplotlib": "bench",
    "multiprocessing": "nothing: workers are our own processes",
    "numpy": "workers, and programs that embed the server",
    "onnxruntime": "workers",
    "opentelemetry": "traces, when they are on",
    "pdb": "nothing",
    "pydantic": "nothing: typer imports it where it is installed",
    "rich": "terminals",
    "sqlite3": "nothing",
    "tkinter": "nothing",
    "torch": "workers",
    "typer": "the other commands",
    "unittest": "tests",
    "kernel.tools.bench": "the other commands",
    "kernel.tools.cli": "the other commands",
    "kernel.flags.help": "--help",
    "kernel.tools.infer": "the other commands",
    "kernel.repository.clouds.process": "cloud repositories",
    "kernel.repository.load_hints": "loads that fail",
    "kernel.embedding": "programs that embed the server",
    "kernel.testing": "tests",
    "protocols.http.openapi.schemas": "/v2/openapi.json, when it is first asked for",
    "protocols.openai": "OpenAI's API, which few servers have",
}

_IMPORTED = re.compile(r"^import time: +\d+ \| +\d+ \| +(\S+)$", re.MULTILINE)
_STARTED = re.compile(r"Started (HTTP|GRPC|Metrics) ?\w* at 127\.0\.0\.1:(\d+)")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the modules of a kernel process that has served a request over each port."""
    errors = tmp_path_factory.mktemp("kernel") / "errors"
    ports = [f"--{door}-{what}" for door in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")]
    command = [sys.executable, "-X", "importtime", "-m", "kernel", "run", *ports]
    # The measurement of coverage imports modules of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    with (
        errors.open("wb") as stream,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, env=environment) as process,
    ):
        try:
            found = dict(_read_ports(process))
            _ask(found)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
    return set(_IMPORTED.findall(Path(errors).read_text()))


def _read_ports(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        if match := _STARTED.search(line.decode()):
            yield match[1], match[2]
            if match[1] == "Metrics":
                return


def _ask(ports: dict[str, str]) -> None:
    body = b'{"inputs":[%s]}' % b",".join(
        b'{"name":"INPUT%d","datatype":"FP32","shape":[4],"data":[1,2,3,4]}' % number for number in (0, 1)
    )
    for url, data in (
        (f"http://127.0.0.1:{ports['HTTP']}/v2/models/add_sub/infer", body),
        (f"http://127.0.0.1:{ports['HTTP']}/v2/repository/index", b""),
        (f"http://127.0.0.1:{ports['Metrics']}/metrics", None),
    ):
        with urllib.request.urlopen(url, data) as response:
            assert response.status == 200
    with grpc.insecure_channel(f"127.0.0.1:{ports['GRPC']}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        request = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[bytes(16), bytes(16)])
        for number in (0, 1):
            request.inputs.add(name=f"INPUT{number}", datatype="FP32", shape=[4])
        assert len(infer(request, timeout=30).outputs) == 2


def test_a_kernel_that_serves_has_not_imported_what_only_others_need(imported: set[str]) -> None:
    assert {"kernel.app", "aiohttp.web_server", "grpclib.server"} <= imported, "the modules of the kernel were not seen"
    wrong = {name: reason for name, reason in FOREIGN.items() for module in imported if _is_in(module, name)}
    assert wrong == {}


def _is_in(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def test_the_modules_that_must_not_be_there_and_are_ours_exist() -> None:
    ours = [name for name in FOREIGN if name.startswith(("kernel.", "protocols."))]
    for name in ours:
        path = Path(__file__).parents[2] / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


#: Our modules that `naiad ready` imports, and no others: flags may say where the server is.
OF_READY = {
    "kernel",
    "kernel.__main__",
    "kernel.cache",
    "kernel.cache.config",
    "kernel.config",
    "kernel.config.gpus",
    "kernel.errors",
    "kernel.flags",
    "kernel.flags.flag",
    "kernel.flags.known",
    "kernel.flags.read",
    "kernel.flags.trace_flags",
    "kernel.naiad_module",
    "kernel.options",
    "kernel.records",
    "kernel.records.record_settings",
    "kernel.regular_files",
    "kernel.repository",
    "kernel.repository.backend_config",
    "kernel.repository.clouds",
    "kernel.repository.clouds.address",
    "kernel.repository.execution_environment",
    "kernel.repository.gpus",
    "kernel.repository.held_folders",
    "kernel.repository.host_policy",
    "kernel.repository.path_hints",
    "kernel.settings",
    "kernel.texts",
    "kernel.tools",
    "kernel.tools.main",
    "kernel.tools.ready",
    "kernel.tools.run",
    "kernel.tree_files",
}

#: What else it must not import: each of them takes as long as all that it needs.
NOT_FOR_READY = {"aiohttp", "asyncio", "google", "numpy", "rich", "typer", "urllib.request"}


def test_a_health_check_imports_only_what_it_needs() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kernel", "ready"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment["NAIAD_URL"] = "127.0.0.1:1"  # nobody listens there
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stderr[-500:]
    imported = set(_IMPORTED.findall(found.stderr))
    ours = {name for name in imported if _is_in(name, "kernel")}
    assert ours | {"kernel.__main__"} == OF_READY
    assert {name for name in imported for foreign in NOT_FOR_READY if _is_in(name, foreign)} == set()


def test_a_command_that_starts_a_server_has_imported_neither_protobuf_nor_asyncio_before() -> None:
    """The zygote of workers starts before the server is imported: what comes first delays it."""
    code = "import sys, kernel.tools.main; print(sorted({'asyncio', 'google.protobuf'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
