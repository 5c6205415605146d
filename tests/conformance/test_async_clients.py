"""tritonclient.http.aio and tritonclient.grpc.aio against a running server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.server import ServerProcess

http_aio = pytest.importorskip("tritonclient.http.aio")
grpc_aio = pytest.importorskip("tritonclient.grpc.aio")
httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.conformance

RAMP = np.arange(16, dtype=np.float32)


def pair(module: Any) -> list[Any]:
    made = []
    for name in ("INPUT0", "INPUT1"):
        tensor = module.InferInput(name, [16], "FP32")
        tensor.set_data_from_numpy(RAMP)
        made.append(tensor)
    return made


def test_http_aio(server: ServerProcess) -> None:
    async def main() -> None:
        async with http_aio.InferenceServerClient(server.url) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("add_sub"))["name"] == "add_sub"
            results = await asyncio.gather(*(client.infer("add_sub", pair(httpclient)) for _ in range(30)))
        for result in results:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP * 2)

    asyncio.run(main())


def test_grpc_aio(server: ServerProcess) -> None:
    async def main() -> None:
        async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(*(client.infer("add_sub", pair(grpcclient)) for _ in range(30)))
        for result in results:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP * 2)

    asyncio.run(main())


def test_grpc_aio_stream(server: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensor = grpcclient.InferInput("IN", [3], "INT32")
        tensor.set_data_from_numpy(np.array([4, 5, 6], np.int32))
        yield {"model_name": "repeat", "inputs": [tensor], "request_id": "a"}

    async def main() -> list[int]:
        async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found += result.as_numpy("OUT").tolist()
            return found

    assert asyncio.run(main()) == [4, 5, 6]
