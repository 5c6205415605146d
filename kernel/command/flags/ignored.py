"""tritonserver's flags that have no effect here, each with the reason. Their values are checked all the same."""

from __future__ import annotations

from kernel.command.flags.flag import Flag, FlagGroup
from kernel.command.flags.values import (
    BYTES,
    CACHE_SETTING,
    FOLDER,
    NAME,
    NUMBER,
    PORT,
    RESOURCE,
    SWITCH,
    Kind,
    one_of,
    pair,
    whole,
)

_ONE_LOOP = "one event loop serves all connections, there is no pool of threads to size"
_NO_POOL = "there is no such pool: tensors travel in memory that grows and shrinks with the requests"
_NO_GPU = "GPUs are not supported yet"
_PYTHON_PACKAGES = "backends, caches and agents are Python packages, they are not looked for in folders"
_NO_CACHE = "there is no response cache yet"
_NO_RATE_LIMITER = "there is no rate limiter yet, instances execute as soon as they are free"
_NO_SAGEMAKER = "there is no SageMaker endpoint yet"
_NO_VERTEX = "there is no Vertex AI endpoint yet"


def _ignored(name: str, kind: Kind, reason: str, *, repeat: bool = False, moot: object = None) -> Flag:
    return Flag(name=name, kind=kind, note=reason, repeat=repeat, moot=moot)


_DEVICE = whole(metavar="DEVICE")
_DEVICE_BYTES = pair("DEVICE:BYTES", ":", _DEVICE, BYTES)
_DEVICE_FRACTION = pair("DEVICE:FRACTION", ":", _DEVICE, NUMBER)
_PORT_RANGE = pair("PORT-PORT", "-", PORT, PORT)

#: The help lists them by reason.
IGNORED = FlagGroup(
    "Accepted without effect",
    "So that command lines of tritonserver keep working. Each one that is given is named in the log with its reason.",
    (
        _ignored("http-thread-count", whole(), _ONE_LOOP),
        _ignored("grpc-infer-thread-count", whole(2, 128), _ONE_LOOP),
        _ignored("buffer-manager-thread-count", whole(raised_to=0), _ONE_LOOP, moot=0),
        _ignored("grpc-infer-allocation-pool-size", whole(), _NO_POOL),
        _ignored("pinned-memory-pool-byte-size", BYTES, _NO_POOL),
        _ignored("cuda-memory-pool-byte-size", _DEVICE_BYTES, _NO_GPU, repeat=True),
        _ignored("cuda-virtual-address-size", _DEVICE_BYTES, _NO_GPU, repeat=True),
        _ignored("min-supported-compute-capability", NUMBER, _NO_GPU),
        _ignored("model-load-gpu-limit", _DEVICE_FRACTION, _NO_GPU, repeat=True),
        _ignored("enable-peer-access", SWITCH, _NO_GPU, moot=False),
        _ignored("allow-gpu-metrics", SWITCH, _NO_GPU, moot=False),
        _ignored("backend-directory", FOLDER, _PYTHON_PACKAGES),
        _ignored("cache-directory", FOLDER, _PYTHON_PACKAGES),
        _ignored("repoagent-directory", FOLDER, _PYTHON_PACKAGES),
        _ignored("cache-config", CACHE_SETTING, _NO_CACHE, repeat=True),
        _ignored("response-cache-byte-size", BYTES, f"{_NO_CACHE} (deprecated for --cache-config=local,size=BYTES)"),
        _ignored("rate-limit", one_of("off", "execution_count", any_case=True), _NO_RATE_LIMITER, moot="off"),
        _ignored("rate-limit-resource", RESOURCE, _NO_RATE_LIMITER, repeat=True),
        _ignored("allow-sagemaker", SWITCH, _NO_SAGEMAKER, moot=False),
        _ignored("sagemaker-port", PORT, _NO_SAGEMAKER),
        _ignored("sagemaker-safe-port-range", _PORT_RANGE, _NO_SAGEMAKER),
        _ignored("sagemaker-thread-count", whole(), _NO_SAGEMAKER),
        _ignored("allow-vertex-ai", SWITCH, _NO_VERTEX, moot=False),
        _ignored("vertex-ai-port", PORT, _NO_VERTEX),
        _ignored("vertex-ai-thread-count", whole(), _NO_VERTEX),
        _ignored("vertex-ai-default-model", NAME, _NO_VERTEX),
    ),
)
