"""The RPCs of the server by their paths, each with its function, its messages and its category.

Every RPC belongs to one of Triton's nine categories. `Admission` refuses a call by its headers and by the address of
its client, before its handler is found. TraceSetting and LogSettings also read settings: their handlers refuse the
changes of clients that may not administer the server.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
from grpclib.const import Cardinality, Handler

from protocols.access import Category
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.intake import MessageIntake
from protocols.grpc.rpc import translated_errors, unary
from protocols.grpc.rpcs.admin import KernelRpcs
from protocols.grpc.rpcs.stream import StreamCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpclib.server import Stream

    from kernel.serving.interface import KernelInterface
    from protocols.access import AdminAccess, Restrictions
    from protocols.grpc.h2.headers import Fields, RequestHead
    from protocols.grpc.intake import MetadataForwarder
    from protocols.grpc.rpc import Caller, OpenCalls
    from protocols.loop_budgets import MessageBudget

SERVICE = "inference.GRPCInferenceService"

#: The one RPC without a handler of grpclib: `protocols.grpc.rpcs.infer` responds to it.
MODEL_INFER = f"/{SERVICE}/ModelInfer"

MODEL_STREAM_INFER = f"/{SERVICE}/ModelStreamInfer"

MODEL_LOAD = f"/{SERVICE}/RepositoryModelLoad"


class Rpc(msgspec.Struct, frozen=True):
    """An RPC of Triton's service. The messages of `NAME` are `NAMERequest` and `NAMEResponse`."""

    category: Category
    #: None for the three that get their messages in a way of their own.
    function: Callable[[KernelRpcs, Any, Caller], Awaitable[Any]] | None
    #: Whether only those who administer the server may call it (--admin-access).
    administers: bool = False


RPCS = {
    "ServerLive": Rpc(Category.HEALTH, KernelRpcs.server_live),
    "ServerReady": Rpc(Category.HEALTH, KernelRpcs.server_ready),
    "ServerMetadata": Rpc(Category.METADATA, KernelRpcs.server_metadata),
    "ModelReady": Rpc(Category.HEALTH, KernelRpcs.model_ready),
    "ModelMetadata": Rpc(Category.METADATA, KernelRpcs.model_metadata),
    "ModelConfig": Rpc(Category.MODEL_CONFIG, KernelRpcs.model_config),
    "ModelStatistics": Rpc(Category.STATISTICS, KernelRpcs.model_statistics),
    "ModelInfer": Rpc(Category.INFERENCE, None),
    "ModelStreamInfer": Rpc(Category.INFERENCE, None),
    "RepositoryIndex": Rpc(Category.MODEL_REPOSITORY, KernelRpcs.repository_index),
    "RepositoryModelLoad": Rpc(Category.MODEL_REPOSITORY, None, administers=True),
    "RepositoryModelUnload": Rpc(Category.MODEL_REPOSITORY, KernelRpcs.repository_model_unload, administers=True),
    "SystemSharedMemoryStatus": Rpc(Category.SHARED_MEMORY, KernelRpcs.system_shared_memory_status),
    "SystemSharedMemoryRegister": Rpc(Category.SHARED_MEMORY, KernelRpcs.system_shared_memory_register, True),
    "SystemSharedMemoryUnregister": Rpc(Category.SHARED_MEMORY, KernelRpcs.system_shared_memory_unregister, True),
    "CudaSharedMemoryStatus": Rpc(Category.SHARED_MEMORY, KernelRpcs.cuda_shared_memory_status),
    "CudaSharedMemoryRegister": Rpc(Category.SHARED_MEMORY, KernelRpcs.cuda_shared_memory_register, True),
    "CudaSharedMemoryUnregister": Rpc(Category.SHARED_MEMORY, KernelRpcs.cuda_shared_memory_unregister, True),
    "TraceSetting": Rpc(Category.TRACE, KernelRpcs.trace_setting),
    "LogSettings": Rpc(Category.LOGGING, KernelRpcs.log_settings),
}

#: The category of each call by its path.
CATEGORIES: dict[str, Category] = {
    **{f"/{SERVICE}/{name}": rpc.category for name, rpc in RPCS.items()},
    "/grpc.health.v1.Health/Check": Category.HEALTH,
    "/grpc.health.v1.Health/Watch": Category.HEALTH,
    # Which services there are is metadata of the server; Triton has no reflection.
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Category.METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Category.METADATA,
}

#: The paths of the calls that administer the server.
ADMINISTERS = frozenset(f"/{SERVICE}/{name}" for name, rpc in RPCS.items() if rpc.administers)


class Admission:
    """Refuses calls. Made only where anything is restricted."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions
        self._paths = ADMINISTERS if restrictions.restricts_admin else frozenset()
        self._paths |= {path for path, category in CATEGORIES.items() if restrictions.of(category) is not None}

    def refusal(self, request_head: RequestHead, peer: object) -> str | None:
        """Return the error text for a call that is refused to this client, None for a call that is allowed."""
        path = request_head.path
        if path not in self._paths:
            return None
        return self._restrictions.refusal(
            CATEGORIES[path],
            lambda name: _first_value(request_head.fields, name),
            peer,
            administers=path in ADMINISTERS,
        )


def _first_value(fields: Fields, name: str) -> bytes | None:
    """Return the value of a header. Of one that is sent twice Triton's multimap returns the first."""
    wanted = name.lower()
    value = next((value for found, value in fields if found == wanted), None)
    return None if value is None else value.encode("latin-1")


class InferenceService:
    """`inference.GRPCInferenceService`, except ModelInfer."""

    def __init__(
        self,
        kernel: KernelInterface,
        calls: OpenCalls,
        admin: AdminAccess,
        forwarder: MetadataForwarder | None = None,
        max_response_pool_size: int | None = None,
        messages: MessageBudget | None = None,
    ) -> None:
        """`max_response_pool_size` is as in `GrpcOptions`, None for no limit; `messages` as in `Intake`."""
        self._rpcs = KernelRpcs(kernel, admin)
        self._calls = calls
        self._max_response_pool_size = max_response_pool_size
        self._streams = MessageIntake(kernel, forwarder, streaming=True)
        self._streams.messages = messages

    def __mapping__(self) -> dict[str, Handler]:
        return {
            MODEL_STREAM_INFER: Handler(
                self._model_stream_infer,
                Cardinality.STREAM_STREAM,
                pb.ModelInferRequest,
                pb.ModelStreamInferResponse,
            ),
            MODEL_LOAD: Handler(
                self._rpcs.repository_model_load,
                Cardinality.UNARY_UNARY,
                pb.RepositoryModelLoadRequest,
                pb.RepositoryModelLoadResponse,
            ),
            **{
                f"/{SERVICE}/{name}": unary(
                    functools.partial(rpc.function, self._rpcs),
                    getattr(pb, f"{name}Request"),
                    getattr(pb, f"{name}Response"),
                )
                for name, rpc in RPCS.items()
                if rpc.function is not None
            },
        }

    async def _model_stream_infer(self, stream: Stream[pb.ModelInferRequest, pb.ModelStreamInferResponse]) -> None:
        with translated_errors("ModelStreamInfer"):
            self._calls.check_accepting()
            call = StreamCall(self._streams, stream, max_response_pool_size=self._max_response_pool_size)
            with self._calls.stoppable(call):
                await call.run()
