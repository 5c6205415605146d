"""tritonserver's flags that have no effect in this server, each with its reason. Their values are still checked."""

from __future__ import annotations

from kernel.command.flags.flag import Flag, FlagGroup
from kernel.command.flags.values import (
    BYTES,
    FOLDER,
    NAME,
    PORT,
    SWITCH,
    Kind,
    integer,
    pair,
)

_ONE_LOOP = "one event loop serves all connections; there is no thread pool"
_NO_POOL = "there is no such pool: memory for tensors grows and shrinks with the requests"
_NO_STATES = "states of sequences are in memory of the host"
_DRIVER = "the driver decides whether GPUs access one another"
_PYTHON_PACKAGES = "caches and agents are Python packages; the server does not search folders for them"
_NO_SAGEMAKER = "there is no SageMaker endpoint yet"
_NO_VERTEX = "there is no Vertex AI endpoint yet"


def _ignored(name: str, kind: Kind, reason: str, *, repeat: bool = False, silent_value: object = None) -> Flag:
    return Flag(name=name, kind=kind, note=reason, repeat=repeat, silent_value=silent_value)


_DEVICE = integer(metavar="DEVICE")
_DEVICE_BYTES = pair("DEVICE:BYTES", ":", _DEVICE, BYTES)
_PORT_RANGE = pair("PORT-PORT", "-", PORT, PORT)

#: The help lists them by reason.
IGNORED = FlagGroup(
    "Accepted without effect",
    "The server accepts these flags so that command lines of tritonserver work. The log names each one that is given, "
    "with the reason.",
    (
        _ignored("http-thread-count", integer(), _ONE_LOOP),
        _ignored("grpc-infer-thread-count", integer(2, 128), _ONE_LOOP),
        _ignored("buffer-manager-thread-count", integer(raised_to=0), _ONE_LOOP, silent_value=0),
        _ignored("grpc-infer-allocation-pool-size", integer(), _NO_POOL),
        _ignored("cuda-virtual-address-size", _DEVICE_BYTES, _NO_STATES, repeat=True),
        _ignored("enable-peer-access", SWITCH, _DRIVER, silent_value=True),
        _ignored("cache-directory", FOLDER, _PYTHON_PACKAGES),
        _ignored("repoagent-directory", FOLDER, _PYTHON_PACKAGES),
        _ignored("allow-sagemaker", SWITCH, _NO_SAGEMAKER, silent_value=False),
        _ignored("sagemaker-port", PORT, _NO_SAGEMAKER),
        _ignored("sagemaker-safe-port-range", _PORT_RANGE, _NO_SAGEMAKER),
        _ignored("sagemaker-thread-count", integer(), _NO_SAGEMAKER),
        _ignored("allow-vertex-ai", SWITCH, _NO_VERTEX, silent_value=False),
        _ignored("vertex-ai-port", PORT, _NO_VERTEX),
        _ignored("vertex-ai-thread-count", integer(), _NO_VERTEX),
        _ignored("vertex-ai-default-model", NAME, _NO_VERTEX),
    ),
)
