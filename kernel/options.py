"""What the server can be told at start, with defaults. `kernel/command/flags/known.py` gives every field its flag."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kernel.errors import ServingError
from kernel.repository.backend_config import parse_backend_configs
from kernel.repository.host_policy import parse_host_policies
from kernel.settings import TraceValues

#: The models that the package carries, served where no repository is given.
DEMO_REPOSITORY = Path(__file__).parent / "demo"


class BadOption(Exception):
    """The server cannot start as it was told to; the message is one line for the person who started it."""


class ListenAddress(msgspec.Struct, frozen=True):
    """One front door: whether it is there, and where it listens."""

    allow: bool
    address: str
    port: int
    #: Whether other processes may listen at the same port (SO_REUSEPORT).
    reuse_port: bool = False


class TlsOptions(msgspec.Struct, frozen=True):
    """How a front door encrypts. Paths are of PEM files."""

    certificate: Path
    key: Path
    #: Certificate authorities of clients; only read where `mutual` is set.
    client_ca: Path | None = None
    #: Whether clients must show a certificate that `client_ca` has signed.
    mutual: bool = False


class HttpOptions(msgspec.Struct, frozen=True):
    """What the HTTP front door is told."""

    #: Largest JSON, raw or inflated request body in bytes.
    max_input_size: int = 64 << 20
    #: Headers in whose name this expression is found become parameters of inference requests; "" for none.
    header_forward_pattern: str = ""
    #: Values of --http-restricted-api as given: "category,category:key=value".
    restricted_api: tuple[str, ...] = ()
    #: Origins that browsers may call from, or "*"; none for no CORS headers.
    cors_origins: tuple[str, ...] = ()
    tls: TlsOptions | None = None


class GrpcOptions(msgspec.Struct, frozen=True):
    """What the gRPC front door is told. Names and defaults are gRPC's and tritonserver's."""

    header_forward_pattern: str = ""
    #: Values of --grpc-restricted-protocol as given: "category,category:key=value".
    restricted_protocol: tuple[str, ...] = ()
    #: none, low, medium or high: how inference responses are compressed.
    infer_response_compression_level: str = "none"
    #: Responses of a stream that may wait for a slow reader before its requests wait, too.
    max_response_pool_size: int = (1 << 31) - 1
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    #: Milliseconds; 0 for no end.
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    tls: TlsOptions | None = None


class MetricsOptions(msgspec.Struct, frozen=True):
    """What the metrics port shows."""

    #: Values of --metrics-config as given: "name=value".
    config: tuple[str, ...] = ()
    allow_cpu_metrics: bool = True
    interval_ms: int = 2000


class LogOptions(msgspec.Struct, frozen=True):
    """What is logged, where, in which form."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    #: default, ISO8601 or json.
    format: str = "default"
    #: Empty for standard output and standard error.
    file: str = ""
    #: Whether every request gets a line.
    access: bool = False


class RepositoryOptions(msgspec.Struct, frozen=True):
    """How models are found and loaded."""

    paths: tuple[Path, ...]
    #: none, explicit or poll.
    control_mode: str = "none"
    #: Seconds between two looks at the repositories, in mode poll.
    poll_s: int = 15
    load_models: tuple[str, ...] = ()
    exit_on_error: bool = True
    auto_complete_config: bool = True
    #: Name of an alternative configuration: MODEL/configs/NAME.pbtxt; "" for config.pbtxt.
    config_name: str = ""
    namespacing: bool = False
    load_thread_count: int = 4
    load_retry_count: int = 0
    #: Seconds that each step of loading an instance may take: completing the configuration, loading the model
    #: (`initialize`), one run of its warm-up. 0 for no limit.
    load_timeout_s: int = 1800
    #: Values of --backend-config as given: "backend,key=value" or "key=value".
    backend_config: tuple[str, ...] = ()
    #: Values of --host-policy as given: "name,key=value".
    host_policy: tuple[str, ...] = ()


class ServerOptions(msgspec.Struct, frozen=True):
    """Everything that the command line decides. Names and defaults are tritonserver's."""

    repository: RepositoryOptions
    http_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8000)
    grpc_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8001)
    metrics_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8002)
    http: HttpOptions = HttpOptions()
    grpc: GrpcOptions = GrpcOptions()
    metrics: MetricsOptions = MetricsOptions()
    log: LogOptions = LogOptions()
    #: Trace settings of the start; clients may change most of them.
    trace: TraceValues = TraceValues()
    server_id: str = "triton"
    strict_readiness: bool = True
    exit_timeout_s: int = 30
    allow_client_shm: str = "local"
    event_loop: str = "uvloop"
    #: The longest wait that is polled through, in microseconds; 0 for none.
    busy_poll_us: int = 500
    arena_byte_size: int = 1 << 34
    #: Whether memory is shared with workers; otherwise tensors travel over their connections.
    worker_shared_memory: bool = True

    @property
    def demo(self) -> bool:
        """Whether the package's own models are served."""
        return self.repository.paths == (DEMO_REPOSITORY,)


def check_options(options: ServerOptions) -> None:
    """Raise `BadOption` where options contradict each other or the machine."""
    for folder in options.repository.paths:
        if not folder.is_dir():
            raise BadOption(
                f"model repository '{folder}' is not a folder. Give an existing one with --model-repository, or none "
                "at all to try the demo models"
            )
    try:
        parse_backend_configs(options.repository.backend_config)
    except ServingError as error:
        raise BadOption(error.message) from None
    try:
        parse_host_policies(options.repository.host_policy)
    except ServingError as error:
        raise BadOption(f"setting host policy: {error.code.title} - {error.message}") from None
    if options.repository.load_models and options.repository.control_mode != "explicit":
        raise BadOption("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in options.repository.load_models and len(options.repository.load_models) > 1:
        raise BadOption("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    taken: dict[tuple[str, int], str] = {}
    for title, listener in (
        ("HTTP", options.http_listener),
        ("GRPC", options.grpc_listener),
        ("metrics", options.metrics_listener),
    ):
        if not listener.allow:
            continue
        place = (listener.address, listener.port)
        if listener.port and place in taken:
            raise BadOption(
                f"The server cannot listen to {taken[place]} requests and {title} requests at the same address "
                f"and port {listener.address}:{listener.port}"
            )
        taken[place] = title


def default_arena_byte_size() -> int:
    """Return the largest power of two that is at most half of the machine's memory.

    An arena is a sparse file: this bounds what one model's tensors can take, and costs nothing.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << max(24, (memory // 2).bit_length() - 1)
