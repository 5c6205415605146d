"""The RPCs of the server by their paths, each with its function and its messages.

Which calls are refused by their headers and by the address of their client. Pure.

Every RPC belongs to one of Triton's nine categories; a call is refused before its handler is found. TraceSetting and
LogSettings also read settings: their handlers refuse the changes of clients that may not administer the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib.const import Cardinality, Handler

from protocols.access import Category
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.intake import MessageIntake
from protocols.grpc.rpc import translated_errors, unary
from protocols.grpc.rpcs.admin import ModelRpcs, RepositoryRpcs, ServerRpcs, SettingsRpcs, SharedMemoryRpcs
from protocols.grpc.rpcs.standard_services import Health, WatchCall
from protocols.grpc.rpcs.stream import StreamCall

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.serving.interface import KernelInterface
    from protocols.access import AdminAccess, Restrictions
    from protocols.grpc.h2.headers import Fields, RequestHead
    from protocols.grpc.intake import MetadataForwarder
    from protocols.grpc.rpc import OpenCalls
    from protocols.loop_budgets import MessageBudget

_INFERENCE_SERVICE = "inference.GRPCInferenceService"

_RPCS: dict[Category, tuple[str, ...]] = {
    Category.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
    Category.METADATA: ("ServerMetadata", "ModelMetadata"),
    Category.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
    Category.SHARED_MEMORY: tuple(
        f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")
    ),
    Category.MODEL_CONFIG: ("ModelConfig",),
    Category.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    Category.STATISTICS: ("ModelStatistics",),
    Category.TRACE: ("TraceSetting",),
    Category.LOGGING: ("LogSettings",),
}

#: The category of each call by its path.
CATEGORIES: dict[str, Category] = {
    **{f"/{_INFERENCE_SERVICE}/{name}": category for category, names in _RPCS.items() for name in names},
    "/grpc.health.v1.Health/Check": Category.HEALTH,
    "/grpc.health.v1.Health/Watch": Category.HEALTH,
    # Which services there are is metadata of the server; Triton has no reflection.
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Category.METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Category.METADATA,
}


#: The calls of those who administer the server alone (--admin-access).
ADMINISTERS = frozenset(
    f"/{_INFERENCE_SERVICE}/{name}"
    for name in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Register", "Unregister")),
    )
)


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


SERVICE = "inference.GRPCInferenceService"

#: The one RPC without a handler of grpclib, see `protocols.grpc.rpcs.infer`.
MODEL_INFER = f"/{SERVICE}/ModelInfer"

MODEL_STREAM_INFER = f"/{SERVICE}/ModelStreamInfer"

MODEL_LOAD = f"/{SERVICE}/RepositoryModelLoad"

HEALTH_SERVICE = "grpc.health.v1.Health"


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
        """`max_response_pool_size` is that of `GrpcOptions`, None for no limit; `messages` is that of `Intake`."""
        self._kernel = kernel
        self._admin = admin
        self._calls = calls
        self._max_response_pool_size = max_response_pool_size
        self._streams = MessageIntake(kernel, forwarder, streaming=True)
        self._streams.messages = messages

    def __mapping__(self) -> dict[str, Handler]:
        handlers = {
            **self._inference_handlers(),
            **self._model_handlers(),
            **self._repository_handlers(),
            **self._shared_memory_handlers(),
            **self._settings_handlers(),
        }
        return {f"/{SERVICE}/{name}": handler for name, handler in handlers.items()}

    def _inference_handlers(self) -> dict[str, Handler]:
        return {
            "ModelStreamInfer": Handler(
                self._model_stream_infer,
                Cardinality.STREAM_STREAM,
                pb.ModelInferRequest,
                pb.ModelStreamInferResponse,
            ),
        }

    async def _model_stream_infer(self, stream: Stream[pb.ModelInferRequest, pb.ModelStreamInferResponse]) -> None:
        with translated_errors("ModelStreamInfer"):
            self._calls.check_accepting()
            call = StreamCall(self._streams, stream, max_response_pool_size=self._max_response_pool_size)
            with self._calls.stoppable(call):
                await call.run()

    def _model_handlers(self) -> dict[str, Handler]:
        server, model = ServerRpcs(self._kernel), ModelRpcs(self._kernel)
        return {
            "ServerLive": unary(server.live, pb.ServerLiveRequest, pb.ServerLiveResponse),
            "ServerReady": unary(server.ready, pb.ServerReadyRequest, pb.ServerReadyResponse),
            "ServerMetadata": unary(server.metadata, pb.ServerMetadataRequest, pb.ServerMetadataResponse),
            "ModelReady": unary(model.ready, pb.ModelReadyRequest, pb.ModelReadyResponse),
            "ModelMetadata": unary(model.metadata, pb.ModelMetadataRequest, pb.ModelMetadataResponse),
            "ModelConfig": unary(model.config, pb.ModelConfigRequest, pb.ModelConfigResponse),
            "ModelStatistics": unary(model.statistics, pb.ModelStatisticsRequest, pb.ModelStatisticsResponse),
        }

    def _repository_handlers(self) -> dict[str, Handler]:
        repository = RepositoryRpcs(self._kernel)
        return {
            "RepositoryIndex": unary(repository.index, pb.RepositoryIndexRequest, pb.RepositoryIndexResponse),
            "RepositoryModelLoad": Handler(
                repository.serve_load,
                Cardinality.UNARY_UNARY,
                pb.RepositoryModelLoadRequest,
                pb.RepositoryModelLoadResponse,
            ),
            "RepositoryModelUnload": unary(
                repository.unload, pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse
            ),
        }

    def _shared_memory_handlers(self) -> dict[str, Handler]:
        rpcs = SharedMemoryRpcs(self._kernel)
        return {
            "SystemSharedMemoryStatus": unary(
                rpcs.system_status,
                pb.SystemSharedMemoryStatusRequest,
                pb.SystemSharedMemoryStatusResponse,
            ),
            "SystemSharedMemoryRegister": unary(
                rpcs.system_register,
                pb.SystemSharedMemoryRegisterRequest,
                pb.SystemSharedMemoryRegisterResponse,
            ),
            "SystemSharedMemoryUnregister": unary(
                rpcs.system_unregister,
                pb.SystemSharedMemoryUnregisterRequest,
                pb.SystemSharedMemoryUnregisterResponse,
            ),
            "CudaSharedMemoryStatus": unary(
                rpcs.cuda_status,
                pb.CudaSharedMemoryStatusRequest,
                pb.CudaSharedMemoryStatusResponse,
            ),
            "CudaSharedMemoryRegister": unary(
                rpcs.cuda_register,
                pb.CudaSharedMemoryRegisterRequest,
                pb.CudaSharedMemoryRegisterResponse,
            ),
            "CudaSharedMemoryUnregister": unary(
                rpcs.cuda_unregister,
                pb.CudaSharedMemoryUnregisterRequest,
                pb.CudaSharedMemoryUnregisterResponse,
            ),
        }

    def _settings_handlers(self) -> dict[str, Handler]:
        rpcs = SettingsRpcs(self._kernel, self._admin)
        return {
            "TraceSetting": unary(rpcs.trace, pb.TraceSettingRequest, pb.TraceSettingResponse),
            "LogSettings": unary(rpcs.log, pb.LogSettingsRequest, pb.LogSettingsResponse),
        }


class HealthService:
    """`grpc.health.v1.Health`."""

    def __init__(self, kernel: KernelInterface, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

    def __mapping__(self) -> dict[str, Handler]:
        check = Health(self._kernel).check
        return {
            f"/{HEALTH_SERVICE}/Check": unary(check, HealthCheckRequest, HealthCheckResponse),
            f"/{HEALTH_SERVICE}/Watch": Handler(
                self._watch, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
            ),
        }

    async def _watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:
        with translated_errors("Watch"):
            call = WatchCall(self._kernel, stream)
            with self._calls.stoppable(call):
                await call.run()
