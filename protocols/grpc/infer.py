"""ModelInfer: one request, one response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import DecoupledOverUnary
from protocols.grpc.codec import decode_request, encode_response, start_request
from protocols.grpc.generated.grpc_service_pb2 import ModelInferResponse
from protocols.sinks import UnarySink, call

if TYPE_CHECKING:
    from kernel.router import Kernel
    from protocols.grpc.calls import OpenCalls
    from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest
    from protocols.grpc.rpc import Caller


class Inference:
    """The unary inference RPC."""

    def __init__(self, kernel: Kernel, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

    async def model_infer(self, message: ModelInferRequest, caller: Caller) -> ModelInferResponse:
        """Execute a request and return its response. Raises `ServingError`.

        A caller that is cancelled, because its client has gone or its deadline has passed, cancels
        the request.
        """
        self._calls.check_accepting()
        model = self._kernel.resolve(message.model_name, message.model_version)
        if model.spec.decoupled:
            raise DecoupledOverUnary("ModelInfer RPC doesn't support models with decoupled transaction policy")
        sink = UnarySink()
        request = start_request(message, sink, streaming=False)
        decode_request(message, request)
        response = await call(self._kernel, request, sink)
        try:
            reply = ModelInferResponse()
            encode_response(response, reply)
        finally:
            response.release()
        return reply
