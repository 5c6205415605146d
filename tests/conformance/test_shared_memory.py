"""tritonclient's shared memory against a running server: no tensor travels in a request."""

from __future__ import annotations

import base64
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.server import ServerProcess

httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

pytestmark = pytest.mark.conformance


class Region:
    """A POSIX region of this process that the server knows."""

    def __init__(self, client: Any, byte_size: int) -> None:
        self.name = f"naiad_test_{uuid.uuid4().hex}"
        self.byte_size = byte_size
        self.handle = shm.create_shared_memory_region(self.name, f"/{self.name}", byte_size)
        self._client = client
        client.register_system_shared_memory(self.name, f"/{self.name}", byte_size)

    def write(self, array: Any, offset: int = 0) -> None:
        shm.set_shared_memory_region(self.handle, [array], offset=offset)

    def read(self, dtype: Any, shape: list[int], offset: int = 0) -> Any:
        return shm.get_contents_as_numpy(self.handle, dtype, shape, offset=offset)

    def close(self) -> None:
        self._client.unregister_system_shared_memory(self.name)
        shm.destroy_shared_memory_region(self.handle)


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return httpclient if request.param == "http" else grpcclient


@pytest.fixture
def client(server: ServerProcess, protocol: Any) -> Iterator[Any]:
    made = protocol.InferenceServerClient(server.url if protocol is httpclient else server.grpc_url)
    yield made
    made.close()


@pytest.fixture
def regions(client: Any) -> Iterator[list[Region]]:
    made = [Region(client, 1 << 20) for _ in range(2)]
    yield made
    for region in made:
        region.close()


def test_inputs_are_read_from_and_outputs_written_to_regions(client: Any, protocol: Any, regions: list[Region]) -> None:
    given, taken = regions
    value = np.random.default_rng(2).random((4, 1000), np.float32)
    given.write(value, offset=64)
    tensor = protocol.InferInput("IN", [4, 1000], "FP32")
    tensor.set_shared_memory(given.name, value.nbytes, offset=64)
    output = protocol.InferRequestedOutput("OUT")
    output.set_shared_memory(taken.name, value.nbytes, offset=128)
    result = client.infer("batched", [tensor], outputs=[output])
    np.testing.assert_array_equal(taken.read(np.float32, [4, 1000], 128), value * 2)
    assert not taken.read(np.uint8, [128]).any(), "bytes before the output were touched"
    np.testing.assert_array_equal(given.read(np.float32, [4, 1000], 64), value)
    shown = result.get_output("OUT")
    assert (shown["shape"] if isinstance(shown, dict) else list(shown.shape)) == [4, 1000]


def test_strings_in_regions(client: Any, protocol: Any, regions: list[Region]) -> None:
    from tritonclient.utils import serialize_byte_tensor

    given, taken = regions
    elements = np.array([b"a", b"longer", b""], object)
    raw = serialize_byte_tensor(elements)
    given.write(raw)
    tensor = protocol.InferInput("IN_BYTES", [3], "BYTES")
    tensor.set_shared_memory(given.name, len(raw.item()))
    output = protocol.InferRequestedOutput("OUT_BYTES")
    output.set_shared_memory(taken.name, 1000)
    client.infer("types", [tensor], outputs=[output])
    assert taken.read(np.object_, [3]).tolist() == elements.tolist()


def test_an_output_that_does_not_fit_is_an_error(client: Any, protocol: Any, regions: list[Region]) -> None:
    given, taken = regions
    tensor = protocol.InferInput("IN", [1, 100], "FP32")
    tensor.set_shared_memory(given.name, 400)
    output = protocol.InferRequestedOutput("OUT")
    output.set_shared_memory(taken.name, 399)
    with pytest.raises(InferenceServerException, match=r"shared memory size specified .* should be at least 400 bytes"):
        client.infer("batched", [tensor], outputs=[output])


@pytest.mark.parametrize(("byte_size", "offset", "text"), [
    (400, (1 << 20) - 399, "Invalid offset \\+ byte size"),
    (400, 1 << 20, "Invalid offset for shared memory region"),
    (399, 0, "input byte size mismatch"),
])  # fmt: skip
def test_ranges_are_checked(
    client: Any, protocol: Any, regions: list[Region], byte_size: int, offset: int, text: str
) -> None:
    tensor = protocol.InferInput("IN", [1, 100], "FP32")
    tensor.set_shared_memory(regions[0].name, byte_size, offset=offset)
    with pytest.raises(InferenceServerException, match=text):
        client.infer("batched", [tensor])


def test_a_name_is_gone_at_once_when_it_is_unregistered(client: Any, protocol: Any) -> None:
    region = Region(client, 4096)
    assert region.name in str(client.get_system_shared_memory_status())
    region.close()
    assert region.name not in str(client.get_system_shared_memory_status())
    tensor = protocol.InferInput("IN", [1, 100], "FP32")
    tensor.set_shared_memory(region.name, 400)
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
        client.infer("batched", [tensor])


def test_device_memory_is_refused_where_there_is_no_gpu(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 64)


def test_a_region_shortened_by_its_owner_costs_no_worker(client: Any, protocol: Any, server: ServerProcess) -> None:
    import os

    workers = server.workers("batched")
    region = Region(client, 1 << 16)
    os.truncate(f"/dev/shm/{region.name}", 0)
    tensor = protocol.InferInput("IN", [1, 100], "FP32")
    tensor.set_shared_memory(region.name, 400)
    with pytest.raises(InferenceServerException, match="truncated by its owner"):
        client.infer("batched", [tensor])
    region.close()
    assert server.workers("batched") == workers
