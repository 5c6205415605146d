"""A client like any other: `healthy_client.py PORT COUNT` makes so many calls and prints the 99th percentile in ms."""

from __future__ import annotations

import sys
import time

import grpc

from protocols.grpc.generated import grpc_service_pb2 as pb

#: Calls that are made before any is measured.
WARM_UP = 50


def main() -> None:
    port, count = sys.argv[1], int(sys.argv[2])
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="UINT8", shape=[16])
    message = pb.ModelInferRequest(model_name="healthy", inputs=[tensor], raw_input_contents=[bytes(16)])
    took_ms: list[float] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        for _ in range(WARM_UP + count):
            begin_ns = time.perf_counter_ns()
            reply = call(message, timeout=30)
            took_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
            assert reply.raw_output_contents == [bytes(16)]
    sys.stdout.write(f"{sorted(took_ms[WARM_UP:])[-1 - count // 100]}\n")


if __name__ == "__main__":
    main()
