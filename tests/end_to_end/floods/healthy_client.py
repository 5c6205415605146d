"""A usual client: `healthy_client.py PORT COUNT PID` makes COUNT calls and prints how long they took.

It is the 99th percentile, in ms of the processor time of the server's process PID: what the server does between a call
and its response. A busy machine makes the clock on the wall run on, and not this one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc

from protocols.grpc.generated import grpc_service_pb2 as pb

#: Calls that are made before any is measured.
WARM_UP = 50


def used_ns(pid: int) -> int:
    """Return how much time of a processor the main thread of a process has used, exactly where the system counts it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except FileNotFoundError:  # a system without CONFIG_SCHED_INFO: in hundredths of a second
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) * 10**9 // os.sysconf("SC_CLK_TCK")


def main() -> None:
    port, count, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
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
            begin_ns = used_ns(server)
            reply = call(message, timeout=30)
            took_ms.append((used_ns(server) - begin_ns) / 1e6)
            assert reply.raw_output_contents == [bytes(16)]
    sys.stdout.write(f"{sorted(took_ms[WARM_UP:])[-1 - count // 100]}\n")


if __name__ == "__main__":
    main()
