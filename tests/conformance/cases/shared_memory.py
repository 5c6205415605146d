"""Shared memory of clients, over HTTP and gRPC, with real regions. Every case unregisters what it registers."""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import (
    EMPTY,
    KEY,
    Case,
    Document,
    Step,
    get,
    infer,
    post,
    read_region,
    region,
    remove_region,
    rpc,
    tensor,
)

FOUR = struct.pack("<4f", 1, 2, 3, 4)
B = tensor("B", "FP32", [4], [1.0] * 4)
STATUS = get("/v2/systemsharedmemory/status")
CLEAR = post("/v2/systemsharedmemory/unregister", {})


def register(name: str = "r", kind: str = "system", **body: Any) -> Step:
    return post(f"/v2/{kind}sharedmemory/region/{name}/register", body)


def place(byte_size: Any = 16, offset: Any = 0, name: Any = "r") -> Document:
    return {"shared_memory_region": name, "shared_memory_byte_size": byte_size, "shared_memory_offset": offset}


def given(**parameters: Any) -> Step:
    """An inference whose first input lies in shared memory."""
    return infer("sum", {"inputs": [tensor("A", "FP32", [4], **parameters), B], "outputs": [{"name": "SUM"}]})


def taken(**parameters: Any) -> Step:
    """An inference whose output goes to shared memory."""
    return infer(
        "sum",
        {"inputs": [tensor("A", "FP32", [4], [1.0] * 4), B], "outputs": [{"name": "SUM", "parameters": parameters}]},
    )


def called(name: str = "r", byte_size: Any = 16, offset: Any = 0) -> Step:
    parameters = {
        "shared_memory_region": {"string_param": name},
        "shared_memory_byte_size": {"int64_param": byte_size},
        "shared_memory_offset": {"int64_param": offset},
    }
    inputs = [tensor("A", "FP32", [4], **parameters), tensor("B", "FP32", [4])]
    return rpc("ModelInfer", {"model_name": "sum", "inputs": inputs, "outputs": [{"name": "SUM"}]}, [FOUR])


ANY_OFFSET = "Triton maps regions, and so an offset must be a multiple of a page there"
SAME_KEY = "the recorded Triton looks at a closed descriptor (CVE-2026-47478)"
NEWER_CHECK = "newer Tritons check this"

CASES = [
    Case(
        "a region is registered, used and left",
        region(KEY, FOUR + bytes(16)),
        register(key=KEY, byte_size=32),
        STATUS,
        get("/v2/systemsharedmemory/region/r/status"),
        given(**place()),
        given(**place(16, 16)),
        taken(**place(16, 16)),
        read_region(KEY, 16, 16),
        called(),
        called(offset=16),
        rpc("SystemSharedMemoryStatus"),
        post("/v2/systemsharedmemory/region/r/unregister", {}),
        STATUS,
        given(**place()),
        remove_region(KEY),
    ),
    Case(
        "keys with and without a slash",
        region(KEY, FOUR),
        register(key=f"/{KEY}", byte_size=16),
        STATUS,
        CLEAR,
        register(key=KEY, byte_size=8, offset=8).differs(ANY_OFFSET, status="http 200", error=None, body=EMPTY),
        STATUS.differs(
            ANY_OFFSET,
            body={
                "content-type": "application/json",
                "json": [{"byte_size": 8, "key": KEY, "name": "r", "offset": 8}],
            },
        ),
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "names twice",
        region(KEY, FOUR),
        register(key=KEY, byte_size=16),
        register(key=KEY, byte_size=16),
        register("s", key=KEY, byte_size=8).differs(SAME_KEY, status="http 200", error=None, body=EMPTY),
        STATUS.differs(
            SAME_KEY,
            body={
                "content-type": "application/json",
                "json": [
                    {"byte_size": 16, "key": KEY, "name": "r", "offset": 0},
                    {"byte_size": 8, "key": KEY, "name": "s", "offset": 0},
                ],
            },
        ),
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "regions that do not fit",
        region(KEY, FOUR),
        register(key=KEY, byte_size=17),
        register(key=KEY, byte_size=8, offset=9),
        register(key=KEY, byte_size=0).differs(
            "one text for all that does not fit", error="failed to register shared memory region 'r': invalid args"
        ),
        register(key=KEY, byte_size=16, offset=16),
        STATUS,
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "register requests without something",
        register(),
        register(key=KEY),
        register(byte_size=16),
        register(key=5, byte_size=16),
        register(key="no_such_key", byte_size=16),
        *(
            register(key=key, byte_size=16).differs(
                NEWER_CHECK,
                status="http 400",
                error=f"cannot register shared memory region 'r' - invalid shm key '{key}'",
            )
            for key in ("/", "")
        ),
        register(key=KEY, byte_size="16"),
        register(key=KEY, byte_size=-1),
        register(key=KEY, byte_size=16, offset=-1),
        register(key=KEY, byte_size=1.5),
        post("/v2/systemsharedmemory/region/r/register", b"{"),
        post("/v2/systemsharedmemory/region/r/register", b""),
        post("/v2/systemsharedmemory/register", {"key": KEY, "byte_size": 16}),
        STATUS,
        CLEAR,
    ),
    Case(
        "inputs outside of their region",
        region(KEY, FOUR + FOUR),
        register(key=KEY, byte_size=32),
        given(**place(32)),
        given(**place(8)),
        given(**place(16, 17)),
        given(**place(16, 32)),
        given(**place(16, 33)),
        given(**place(0)),
        given(**place(-1)),
        given(**place(16, -1)),
        given(**place("16")),
        given(**place(16, "0")),
        given(**place(name=5)),
        given(**place(2**63)),
        given(**place(2**64 - 32, 32)),
        given(shared_memory_region="r"),
        given(shared_memory_byte_size=16),
        given(shared_memory_offset=16),
        given(**place(name="absent")),
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "outputs outside of their region",
        region(KEY, bytes(32)),
        register(key=KEY, byte_size=32),
        taken(**place(8)),
        taken(**place(16, 32)),
        taken(**place(32)),
        taken(**place(name="absent")),
        taken(**place(), binary_data=True),
        taken(**place(), classification=1),
        taken(shared_memory_region="r"),
        taken(shared_memory_byte_size=16),
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "gRPC, outside of the region",
        region(KEY, FOUR),
        register(key=KEY, byte_size=16),
        called(byte_size=17),
        called(byte_size=8),
        called(offset=8),
        called("absent"),
        called(byte_size=0),
        called(byte_size=-1),
        called(offset=-1),
        rpc("SystemSharedMemoryStatus", {"name": "absent"}),
        rpc("SystemSharedMemoryStatus", {"name": "r"}),
        rpc("SystemSharedMemoryRegister", {"name": "r", "key": KEY, "byte_size": 16}),
        rpc("SystemSharedMemoryRegister", {"name": "s", "byte_size": 16}).differs(
            NEWER_CHECK,
            status="grpc INVALID_ARGUMENT",
            error="cannot register shared memory region 's' - invalid shm key ''",
        ),
        rpc("SystemSharedMemoryUnregister", {"name": "r"}),
        rpc("SystemSharedMemoryUnregister", {"name": "r"}),
        rpc("SystemSharedMemoryRegister", {"key": KEY, "byte_size": 16}),
        rpc("SystemSharedMemoryStatus"),
        CLEAR,
        remove_region(KEY),
    ),
    Case(
        "device memory",
        get("/v2/cudasharedmemory/status"),
        get("/v2/cudasharedmemory/region/c/status"),
        register("c", "cuda"),
        register("c", "cuda", raw_handle={"b64": "AAAA"}, byte_size=16, device_id=0),
        register("c", "cuda", raw_handle={}, byte_size=16, device_id=0),
        register("c", "cuda", raw_handle="AAAA", byte_size=16),
        register("c", "cuda", raw_handle={"b64": "!"}, byte_size=16, device_id=0),
        post("/v2/cudasharedmemory/region/c/unregister", {}),
        post("/v2/cudasharedmemory/unregister", {}),
        post("/v2/cudasharedmemory/register", {}),
        rpc("CudaSharedMemoryStatus", {"name": "c"}),
        rpc("CudaSharedMemoryRegister", {"name": "c", "raw_handle": "AAAA", "byte_size": 16}).differs(
            "what Triton says where it is built without GPUs",
            error="failed to register CUDA shared memory region: 'c', GPUs not supported",
        ),
        rpc("CudaSharedMemoryUnregister", {"name": "c"}),
        rpc("CudaSharedMemoryUnregister"),
    ),
    Case(
        "unregistering what is not there",
        post("/v2/systemsharedmemory/region/absent/unregister", {}),
        CLEAR,
        post("/v2/systemsharedmemory/unregister", b"{"),
        rpc("SystemSharedMemoryUnregister", {"name": "absent"}),
        rpc("SystemSharedMemoryUnregister"),
    ),
]
