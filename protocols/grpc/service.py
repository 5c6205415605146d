"""The RPCs of the server by their paths, each with its function and its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib.const import Cardinality, Handler

from protocols.grpc.admin import ModelRpcs, RepositoryRpcs, ServerRpcs
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.health import Health, WatchCall
from protocols.grpc.infer import Inference
from protocols.grpc.rpc import translated_errors, unary
from protocols.grpc.settings import SettingsRpcs
from protocols.grpc.shared_memory import SharedMemoryRpcs
from protocols.grpc.stream import StreamCall

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.router import Kernel
    from protocols.grpc.calls import OpenCalls

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


class InferenceService:
    """`inference.GRPCInferenceService`."""

    def __init__(self, kernel: Kernel, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

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
        inference = Inference(self._kernel, self._calls)
        return {
            "ModelInfer": unary(
                inference.model_infer, pb.ModelInferRequest, pb.ModelInferResponse, self._calls
            ),
            "ModelStreamInfer": Handler(
                self._model_stream_infer,
                Cardinality.STREAM_STREAM,
                pb.ModelInferRequest,
                pb.ModelStreamInferResponse,
            ),
        }

    async def _model_stream_infer(
        self, stream: Stream[pb.ModelInferRequest, pb.ModelStreamInferResponse]
    ) -> None:
        with self._calls.running(), translated_errors("ModelStreamInfer"):
            self._calls.check_accepting()
            call = StreamCall(self._kernel, stream)
            with self._calls.stoppable(call):
                await call.run()

    def _model_handlers(self) -> dict[str, Handler]:
        server, model, calls = ServerRpcs(self._kernel), ModelRpcs(self._kernel), self._calls
        return {
            "ServerLive": unary(server.live, pb.ServerLiveRequest, pb.ServerLiveResponse, calls),
            "ServerReady": unary(server.ready, pb.ServerReadyRequest, pb.ServerReadyResponse, calls),
            "ServerMetadata": unary(
                server.metadata, pb.ServerMetadataRequest, pb.ServerMetadataResponse, calls
            ),
            "ModelReady": unary(model.ready, pb.ModelReadyRequest, pb.ModelReadyResponse, calls),
            "ModelMetadata": unary(model.metadata, pb.ModelMetadataRequest, pb.ModelMetadataResponse, calls),
            "ModelConfig": unary(model.config, pb.ModelConfigRequest, pb.ModelConfigResponse, calls),
            "ModelStatistics": unary(
                model.statistics, pb.ModelStatisticsRequest, pb.ModelStatisticsResponse, calls
            ),
        }

    def _repository_handlers(self) -> dict[str, Handler]:
        repository, calls = RepositoryRpcs(self._kernel), self._calls
        return {
            "RepositoryIndex": unary(
                repository.index, pb.RepositoryIndexRequest, pb.RepositoryIndexResponse, calls
            ),
            "RepositoryModelLoad": unary(
                repository.load, pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse, calls
            ),
            "RepositoryModelUnload": unary(
                repository.unload, pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse, calls
            ),
        }

    def _shared_memory_handlers(self) -> dict[str, Handler]:
        rpcs, calls = SharedMemoryRpcs(self._kernel), self._calls
        return {
            "SystemSharedMemoryStatus": unary(
                rpcs.system_status,
                pb.SystemSharedMemoryStatusRequest,
                pb.SystemSharedMemoryStatusResponse,
                calls,
            ),
            "SystemSharedMemoryRegister": unary(
                rpcs.system_register,
                pb.SystemSharedMemoryRegisterRequest,
                pb.SystemSharedMemoryRegisterResponse,
                calls,
            ),
            "SystemSharedMemoryUnregister": unary(
                rpcs.system_unregister,
                pb.SystemSharedMemoryUnregisterRequest,
                pb.SystemSharedMemoryUnregisterResponse,
                calls,
            ),
            "CudaSharedMemoryStatus": unary(
                rpcs.cuda_status,
                pb.CudaSharedMemoryStatusRequest,
                pb.CudaSharedMemoryStatusResponse,
                calls,
            ),
            "CudaSharedMemoryRegister": unary(
                rpcs.cuda_register,
                pb.CudaSharedMemoryRegisterRequest,
                pb.CudaSharedMemoryRegisterResponse,
                calls,
            ),
            "CudaSharedMemoryUnregister": unary(
                rpcs.cuda_unregister,
                pb.CudaSharedMemoryUnregisterRequest,
                pb.CudaSharedMemoryUnregisterResponse,
                calls,
            ),
        }

    def _settings_handlers(self) -> dict[str, Handler]:
        rpcs, calls = SettingsRpcs(self._kernel), self._calls
        return {
            "TraceSetting": unary(rpcs.trace, pb.TraceSettingRequest, pb.TraceSettingResponse, calls),
            "LogSettings": unary(rpcs.log, pb.LogSettingsRequest, pb.LogSettingsResponse, calls),
        }


class HealthService:
    """`grpc.health.v1.Health`."""

    def __init__(self, kernel: Kernel, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

    def __mapping__(self) -> dict[str, Handler]:
        check = Health(self._kernel).check
        return {
            f"/{HEALTH_SERVICE}/Check": unary(check, HealthCheckRequest, HealthCheckResponse, self._calls),
            f"/{HEALTH_SERVICE}/Watch": Handler(
                self._watch, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
            ),
        }

    async def _watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:
        with self._calls.running(), translated_errors("Watch"):
            call = WatchCall(self._kernel, stream)
            with self._calls.stoppable(call):
                if self._calls.stopping:
                    call.stop()
                await call.run()
