"""h2load of nghttp2, another implementation of HTTP/2, as the client of a running server."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import trustme

from bench.server import ServerProcess
from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

H2LOAD = shutil.which("h2load")

pytestmark = pytest.mark.skipif(H2LOAD is None, reason="h2load (Debian's nghttp2-client) is not installed")

CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
"""


@pytest.fixture(scope="module", params=["http", "https"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return where a server listens, with and without TLS."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "models" / "identity" / "1").mkdir(parents=True)
    (folder / "models" / "identity" / "config.pbtxt").write_text(CONFIG)
    flags: list[str] = []
    if request.param == "https":
        certificate = trustme.CA().issue_cert("127.0.0.1")
        certificate.cert_chain_pems[0].write_to_path(folder / "certificate")
        certificate.private_key_pem.write_to_path(folder / "key")
        flags = [
            "--grpc-use-ssl=true",
            f"--grpc-server-cert={folder / 'certificate'}",
            f"--grpc-server-key={folder / 'key'}",
        ]
    with ServerProcess(folder / "models", *flags) as server:
        yield f"{request.param}://{server.grpc_url}"


@pytest.mark.parametrize(
    ("byte_size", "count", "more"),
    [
        (16, 4000, ["-c4", "-m100"]),
        (16, 200, ["-c50", "-m1"]),
        (2**18, 200, ["-c4", "-m8"]),
        (2**18, 50, ["-c2", "-m8", "-w16", "-W16"]),  # windows that are smaller than an answer
    ],
)
def test_all_requests_are_answered(url: str, tmp_path: Path, byte_size: int, count: int, more: list[str]) -> None:
    tensor = ModelInferRequest.InferInputTensor(name="IN", datatype="UINT8", shape=[byte_size])
    message = ModelInferRequest(model_name="identity", inputs=[tensor], raw_input_contents=[bytes(byte_size)])
    content = message.SerializeToString()
    body = tmp_path / "body"
    body.write_bytes(bytes(1) + len(content).to_bytes(4, "big") + content)
    assert H2LOAD is not None
    command = [H2LOAD, f"-n{count}", *more, f"-d{body}", "-Hcontent-type: application/grpc", "-Hte: trailers"]
    command.append(f"{url}/inference.GRPCInferenceService/ModelInfer")
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=50, text=True).stdout
    assert f"{count} succeeded, 0 failed, 0 errored" in output
    # What was received is more than the tensors: their answers were no errors.
    received = re.search(r"\((\d+)\) data", output)
    assert received is not None
    assert int(received[1]) > count * byte_size
