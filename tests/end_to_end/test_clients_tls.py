"""tritonclient over TLS, with and without a certificate of the client, against a server started by its flags."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trustme

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

pytestmark = pytest.mark.conformance

MODELS = Path(__file__).parents[1] / "models"
RAMP = np.arange(16, dtype=np.float32)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of certificates and keys: of the server, of a client, and of who signed both."""
    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    paths = {"root": folder / "root.pem"}
    authority.cert_pem.write_to_path(paths["root"])
    for name, identity in (("server", "localhost"), ("client", "client@example.org")):
        issued = authority.issue_cert(identity)
        paths[name], paths[f"{name}-key"] = folder / f"{name}.pem", folder / f"{name}-key.pem"
        issued.cert_chain_pems[0].write_to_path(paths[name])
        issued.private_key_pem.write_to_path(paths[f"{name}-key"])
    return {name: str(path) for name, path in paths.items()}


def flags(pem: dict[str, str]) -> list[str]:
    return [
        flag
        for door in ("http", "grpc")
        for flag in (
            f"--{door}-use-ssl-mutual=true",
            f"--{door}-server-cert={pem['server']}",
            f"--{door}-server-key={pem['server-key']}",
            f"--{door}-root-cert={pem['root']}",
        )
    ]


@pytest.fixture(scope="module")
def server(pem: dict[str, str]) -> Iterator[ServerProcess]:
    only = ("--model-control-mode=explicit", "--load-model=add_sub")
    with ServerProcess(MODELS, *only, *flags(pem)) as running:
        yield running


def pair(module: Any) -> list[Any]:
    made = []
    for name in ("INPUT0", "INPUT1"):
        tensor = module.InferInput(name, [16], "FP32")
        tensor.set_data_from_numpy(RAMP)
        made.append(tensor)
    return made


def http(server: ServerProcess, pem: dict[str, str], *, certificate: bool) -> Any:
    def context() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=pem["root"])
        if certificate:
            made.load_cert_chain(pem["client"], pem["client-key"])
        return made

    return httpclient.InferenceServerClient(
        f"localhost:{server.http_port}", ssl=True, ssl_context_factory=context, concurrency=4
    )


def grpc(server: ServerProcess, pem: dict[str, str], *, certificate: bool) -> Any:
    own = {"private_key": pem["client-key"], "certificate_chain": pem["client"]} if certificate else {}
    url = f"localhost:{server.grpc_port}"
    return grpcclient.InferenceServerClient(url, ssl=True, root_certificates=pem["root"], **own)


@pytest.mark.parametrize(("module", "connect"), [(httpclient, http), (grpcclient, grpc)], ids=["http", "grpc"])
def test_inference_with_certificates_of_both_sides(
    server: ServerProcess, pem: dict[str, str], module: Any, connect: Any
) -> None:
    with connect(server, pem, certificate=True) as client:
        assert client.is_server_ready()
        for _ in range(5):
            result = client.infer("add_sub", pair(module))
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP * 2)


def test_a_client_without_a_certificate_is_refused(server: ServerProcess, pem: dict[str, str]) -> None:
    refusals = (OSError, pytest.importorskip("geventhttpclient.response").HTTPConnectionClosed)
    with http(server, pem, certificate=False) as client, pytest.raises(refusals):
        client.is_server_live()
    with grpc(server, pem, certificate=False) as client, pytest.raises(InferenceServerException):
        client.is_server_live(client_timeout=10)
