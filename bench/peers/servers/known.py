"""All peers, in the order of the table."""

from __future__ import annotations

from bench.peers.servers import bentoml, fastapi, kserve, litserve, mlserver, mosec, naiad, ray_serve, triton

PEERS = [
    naiad.PEER,
    triton.PYTHON,
    triton.ONNX,
    mosec.PEER,
    fastapi.PEER,
    kserve.PEER,
    mlserver.PEER,
    litserve.PEER,
    bentoml.PEER,
    ray_serve.PEER,
]
