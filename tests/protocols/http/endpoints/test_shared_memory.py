from __future__ import annotations

import base64
import json
import struct
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
HANDLE = base64.b64encode(bytes(64)).decode()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    block = SharedMemory(create=True, size=8192)
    yield block
    block.close()
    block.unlink()


async def post(session: aiohttp.ClientSession, path: str, body: Any = b"") -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(path, data=data) as response:
        assert response.content_type == "application/json"
        return response.status, await response.read()


async def status(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as response:
        return await response.json()


def test_a_region_is_registered_listed_and_forgotten(exchange: Exchange, memory: SharedMemory) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        body = {"key": memory.name, "offset": 4096, "byte_size": 64}
        shown = {"name": "r", **body}
        assert await post(session, f"{SYSTEM}/region/r/register", body) == (200, b"")
        assert await status(session, f"{SYSTEM}/status") == [shown]
        assert await status(session, f"{SYSTEM}/region/r/status") == [shown]
        assert await status(session, f"{CUDA}/status") == []
        assert await status(session, f"{CUDA}/region/r/status") == {
            "error": "The region named 'r' is registered as system shared memory, not CUDA shared memory"
        }
        assert (await post(session, f"{SYSTEM}/region/r/register", body))[0] == 400
        assert await post(session, f"{SYSTEM}/region/r/unregister") == (200, b"")
        assert await status(session, f"{SYSTEM}/status") == []
        assert await post(session, f"{SYSTEM}/region/r/unregister") == (200, b"")

    exchange(test)


def test_all_regions_are_forgotten_at_once(exchange: Exchange, memory: SharedMemory) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for name in ("a", "b"):
            await post(session, f"{SYSTEM}/region/{name}/register", {"key": memory.name, "byte_size": 64})
        assert await post(session, f"{CUDA}/unregister") == (200, b"")
        assert len(await status(session, f"{SYSTEM}/status")) == 2
        assert await post(session, f"{SYSTEM}/unregister") == (200, b"")
        assert await status(session, f"{SYSTEM}/status") == []

    exchange(test)


EMPTY_DOCUMENT = "failed to parse the request JSON buffer: The document is empty. at 0"
NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


@pytest.mark.parametrize(
    ("path", "body", "code", "text"),
    [
        (f"{SYSTEM}/register", {}, 400, "'region name' is necessary to register system shared memory region"),
        (f"{CUDA}/register", {}, 400, "'region name' is necessary to register cuda shared memory region"),
        (f"{SYSTEM}/region/r/register", b"", 500, EMPTY_DOCUMENT),
        (f"{SYSTEM}/region/r/register", [], 400, "Shared memory register request has no 'key' field"),
        (f"{SYSTEM}/region/r/register", {"key": 5}, 500, "attempt to access JSON non-string as string"),
        (f"{SYSTEM}/region/r/register", {"key": "/k"}, 400, "Shared memory register request has no 'byte_size' field"),
        (f"{SYSTEM}/region/r/register", {"key": "/k", "byte_size": -1}, 500, NOT_UNSIGNED),
        (f"{SYSTEM}/region/r/register", {"key": "/k", "byte_size": 4, "offset": "x"}, 500, NOT_UNSIGNED),
        (
            f"{SYSTEM}/region/r/register",
            {"key": "/naiad_no_such_key", "byte_size": 4},
            500,
            "Unable to open shared memory region: '/naiad_no_such_key'",
        ),
        (f"{CUDA}/region/c/register", {}, 400, "Shared memory register request has no 'raw_handle' field"),
        (f"{CUDA}/region/c/register", {"raw_handle": 5}, 500, "attempt to access non-existing object member 'b64'"),
        (
            f"{CUDA}/region/c/register",
            {"raw_handle": {"b64": HANDLE}},
            500,
            "attempt to access non-existing object member 'byte_size'",
        ),
        (
            f"{CUDA}/region/c/register",
            {"raw_handle": {"b64": HANDLE}, "byte_size": 4},
            500,
            "attempt to access non-existing object member 'device_id'",
        ),
        (
            f"{CUDA}/region/c/register",
            {"raw_handle": {"b64": "YQ=="}, "byte_size": 4, "device_id": 0},
            400,
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        ),
        (
            f"{CUDA}/region/c/register",
            {"raw_handle": {"b64": "Y"}, "byte_size": 4, "device_id": 0},
            400,
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        ),
    ],
)  # fmt: skip
def test_bad_registrations_are_refused_with_tritons_text(
    exchange: Exchange, path: str, body: Any, code: int, text: str
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        found, received = await post(session, path, body)
        assert (found, json.loads(received)) == (code, {"error": text})

    exchange(test)


def test_clients_can_be_refused_altogether(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.settings = msgspec.structs.replace(kernel.settings, allow_client_shm="false")
        for path in (f"{SYSTEM}/region/r/register", f"{CUDA}/region/r/register", f"{SYSTEM}/unregister"):
            found, received = await post(session, path, b"not looked at")
            assert found == 501
            assert b"Client shared memory is disabled." in received
        assert await status(session, f"{SYSTEM}/status") == []

    exchange(test)


def test_an_unknown_region_in_a_request_is_an_error(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "parameters": place}
        found, received = await post(session, "/v2/models/echo/infer", {"inputs": [tensor]})
        assert (found, json.loads(received)) == (404, {"error": "Unable to find shared memory region: 'r'"})

    exchange(test)


def test_a_region_is_leased_while_a_request_runs(exchange: Exchange, memory: SharedMemory) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert memory.buf is not None
        memory.buf[:4] = struct.pack("<f", 2.5)
        await post(session, f"{SYSTEM}/region/r/register", {"key": memory.name, "byte_size": 64})
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        body = {
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}],
            "outputs": [{"name": "OUT_IN", "parameters": place}],
        }
        assert (await post(session, "/v2/models/echo/infer", body))[0] == 200
        assert (await post(session, f"{SYSTEM}/unregister"))[0] == 200

    exchange(test)
