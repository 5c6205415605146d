"""The options of the server at start, with defaults. `kernel/flags/known.py` has the flag for each field."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.cache.config import parse_cache_config
from kernel.errors import BadOption, ServingError
from kernel.records.record_settings import RecordSettings  # noqa: TC001 - msgspec reads it
from kernel.repository.backend_config import parse_backend_configs
from kernel.repository.clouds.address import CloudAddress  # noqa: TC001 - msgspec reads it
from kernel.repository.execution_environment import EnvironmentSettings
from kernel.repository.gpus import GpuOptions
from kernel.repository.host_policy import parse_host_policies
from kernel.settings import LogSettings, LogValues, TraceValues

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The demo models of the package. The server uses them if no repository is given.
DEMO_REPOSITORY = Path(__file__).parent / "demo"

#: The demo of the OpenAI front door (`--demo=chat`), and the files of `naiad init --template chat`.
CHAT_DEMO_REPOSITORY = Path(__file__).parent / "tools" / "demo"


class ListenAddress(msgspec.Struct, frozen=True):
    """Address and port of a front door."""

    #: Whether the front door is open at all.
    allow: bool
    address: str
    #: 0 for any free port.
    port: int
    #: Whether other processes may listen on the same port (SO_REUSEPORT).
    reuse_port: bool = False


class TlsOptions(msgspec.Struct, frozen=True):
    """TLS of a front door. The paths are of PEM files."""

    certificate: Path
    key: Path
    #: Certificate authorities of the clients; used only with `mutual`.
    client_ca: Path | None = None
    #: Whether clients must have a certificate that `client_ca` has signed.
    mutual: bool = False


class HttpOptions(msgspec.Struct, frozen=True):
    """Options of the HTTP front door."""

    #: The largest request body in bytes: JSON, raw, or after decompression.
    max_input_size: int = 64 << 20
    #: A regular expression. Headers whose names contain a match become parameters of inference requests; "" for none.
    header_forward_pattern: str = ""
    #: Values of --http-restricted-api, not parsed: "category,category:key=value".
    restricted_api: tuple[str, ...] = ()
    #: Origins of web pages that may call the server, or "*"; empty for no CORS headers.
    cors_origins: tuple[str, ...] = ()
    #: Values of --http-allowed-hosts, not parsed: "name,name"; empty for the default of `protocols.http.browsers`.
    allowed_hosts: tuple[str, ...] = ()
    #: Whether there is a page for people at / and /dashboard.
    dashboard: bool = True
    tls: TlsOptions | None = None


class OpenAiOptions(msgspec.Struct, frozen=True):
    """Options of the OpenAI front door. Those of the HTTP front door hold for it, too."""

    #: The most tokens of a response where the client does not say it; None for 16 tokens of completions, and for a chat
    #: until the model ends it.
    default_max_tokens: int | None = None
    #: The file with the API keys of clients; None if they need none.
    api_keys: Path | None = None


class GrpcOptions(msgspec.Struct, frozen=True):
    """Options of the gRPC front door. Names and defaults are gRPC's and tritonserver's."""

    #: A regular expression. Metadata whose names contain a match become parameters of inference requests; "" for none.
    header_forward_pattern: str = ""
    #: Values of --grpc-restricted-protocol, not parsed: "category,category:key=value".
    restricted_protocol: tuple[str, ...] = ()
    #: Compression of inference responses: none, low, medium or high.
    infer_response_compression_level: str = "none"
    #: The number of responses of a stream that may wait for a slow client. Then the model waits (backpressure).
    max_response_pool_size: int = (1 << 31) - 1
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    #: 0 for no limit.
    max_connection_age_ms: int = 0
    #: 0 for no limit.
    max_connection_age_grace_ms: int = 0
    tls: TlsOptions | None = None


class AdminOptions(msgspec.Struct, frozen=True):
    """Who may load and unload models, change settings of logs and traces, and register shared memory."""

    #: local, key or open.
    access: str = "open"
    #: Value of --admin-key: the key, "@FILE" or "$VARIABLE"; empty for none.
    key: str = ""


class MetricsOptions(msgspec.Struct, frozen=True):
    """Options of the metrics front door."""

    #: Values of --metrics-config, not parsed: "name=value".
    config: tuple[str, ...] = ()
    allow_cpu_metrics: bool = True
    allow_gpu_metrics: bool = True
    #: Time between two measurements of the CPU and memory metrics.
    interval_ms: int = 2000


class LogOptions(msgspec.Struct, frozen=True):
    """Options of the log."""

    #: Verbose level; 0 for no verbose lines.
    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    #: default, ISO8601 or json.
    format: str = "default"
    #: Path of the log file; empty for standard output and standard error.
    file: str = ""
    #: Whether the log has a line for every HTTP request and gRPC call.
    access: bool = False
    #: How many lines and bytes per second the log takes of what each model instance prints; 0 for no limit.
    model_lines_per_s: int = 1000
    model_bytes_per_s: int = 1 << 20

    def settings(self) -> LogSettings:
        """Return the settings of the log at the start; clients may change them."""
        return LogSettings(
            LogValues(
                log_file=self.file,
                log_info=self.info,
                log_warning=self.warning,
                log_error=self.error,
                log_verbose_level=self.verbose,
                log_format=self.format,
            )
        )


class RateLimitOptions(msgspec.Struct, frozen=True):
    """Options of the rate limiter."""

    #: off or execution_count.
    mode: str = "off"
    #: Values of --rate-limit-resource, not parsed: "name:count" or "name:count:device".
    resources: tuple[str, ...] = ()


class CacheOptions(msgspec.Struct, frozen=True):
    """Options of the response cache."""

    #: Values of --cache-config, not parsed: "name,key=value".
    config: tuple[str, ...] = ()
    #: The size of a local cache in bytes, if `config` is empty; 0 for none. Deprecated in Triton.
    local_byte_size: int = 0


class RepositoryOptions(msgspec.Struct, frozen=True):
    """Options of the model repositories."""

    paths: tuple[Path | CloudAddress, ...]
    #: none, explicit or poll.
    control_mode: str = "none"
    #: Seconds between two polls of the repositories, in mode poll.
    poll_s: int = 15
    load_models: tuple[str, ...] = ()
    exit_on_error: bool = True
    auto_complete_config: bool = True
    #: Name of an alternative configuration: MODEL/configs/NAME.pbtxt; "" for config.pbtxt.
    config_name: str = ""
    #: The folder for copies of models from clouds, which stay there. "" for a temporary one.
    copies: str = ""
    namespacing: bool = False
    load_thread_count: int = 4
    load_retry_count: int = 0
    #: Seconds that each step of loading an instance may take: completing the configuration, loading the model
    #: (`initialize`), the warm-up. 0 for no limit.
    load_timeout_s: int = 1800
    #: Seconds in which the last requests of a version may end that was unloaded or replaced.
    unload_timeout_s: int = 300
    #: Values of --backend-config, not parsed: "backend,key=value" or "key=value".
    backend_config: tuple[str, ...] = ()
    #: Which models may be loaded from pickles: `false`, `true`, or names separated by commas.
    allow_pickle: str = "false"
    #: The folder with a folder for each backend that is a file.
    backend_directory: Path | None = None
    #: Values of --host-policy, not parsed: "name,key=value".
    host_policy: tuple[str, ...] = ()


#: The launchers that use agents of other hosts, and that let Ray place them; and the choice of one, or of this machine.
AGENT, RAY, AUTO = "agent", "ray", "auto"


class LauncherOptions(msgspec.Struct, frozen=True):
    """What starts the workers of models."""

    #: Names of launchers; models which name none have the first one.
    names: tuple[str, ...] = ("local",)
    #: Addresses of agents of other hosts.
    agents: tuple[tuple[str, int], ...] = ()
    #: The file with the token of the agents; None for none.
    token_file: Path | None = None
    #: PEM files of the server's own certificate, its key, and the authority of the agents: all three, or none.
    cert_file: Path | None = None
    key_file: Path | None = None
    root_cert_file: Path | None = None
    #: As the address of `ray.init`; "" for the cluster that this machine is in.
    ray_address: str = ""
    #: How long an agent that Ray has placed waits for its server, in seconds.
    lease_s: float = 60.0
    #: How many workers `auto` starts on this machine; 0 for as many as it has processors.
    max_local_workers: int = 0

    @property
    def tls(self) -> TlsOptions | None:
        """The TLS of connections to agents; None without."""
        if self.cert_file is None or self.key_file is None:
            return None
        return TlsOptions(self.cert_file, self.key_file, self.root_cert_file, mutual=True)

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the launchers for other hosts."""
        found = [name for name in self.names if name not in ("local", AUTO)]
        if AUTO in self.names:
            found += [AGENT] if self.agents else []
            found += [RAY] if self.ray_address else []
        return tuple(dict.fromkeys(found))


class ServerOptions(msgspec.Struct, frozen=True):
    """All options of the command line. Names and defaults are tritonserver's."""

    repository: RepositoryOptions
    http_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8000)
    grpc_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8001)
    metrics_listener: ListenAddress = ListenAddress(True, "0.0.0.0", 8002)
    openai_listener: ListenAddress = ListenAddress(False, "0.0.0.0", 9000)
    gpus: GpuOptions = GpuOptions()
    http: HttpOptions = HttpOptions()
    grpc: GrpcOptions = GrpcOptions()
    metrics: MetricsOptions = MetricsOptions()
    openai: OpenAiOptions = OpenAiOptions()
    log: LogOptions = LogOptions()
    #: Trace settings at start; clients may change most of them.
    trace: TraceValues = TraceValues()
    #: What the flight recorder records, and where; None for nothing.
    record: RecordSettings | None = None
    #: Where what clients have set outlives the server; None: nowhere.
    state_directory: Path | None = None
    server_id: str = "triton"
    strict_readiness: bool = True
    #: Whether the ports listen while the models of the start load, or only when these are loaded (as Triton's).
    listen_while_loading: bool = True
    #: Seconds in which requests in flight may end when the server stops.
    exit_timeout_s: int = 30
    #: Seconds that an execution may take before its worker is ended, and before it is reported; 0 for never.
    execution_timeout_s: float = 0
    execution_report_s: float = 60
    #: Seconds that a response of a decoupled model may wait for its reader; 0 for any time.
    response_wait_timeout_s: float = 120
    #: Whether an author may stop a model in a debugger: no model is ended because it takes long (`dev`).
    debugging: bool = False
    admin: AdminOptions = AdminOptions()
    cache: CacheOptions = CacheOptions()
    rate_limit: RateLimitOptions = RateLimitOptions()
    #: local, true or false.
    allow_client_shm: str = "local"
    #: Who may use, list and unregister a region: any client, or only the peer that has registered it.
    shared_memory_owner: str = "any"
    #: The most regions of a client; 0 for no limit but the limit of all clients together.
    regions_per_peer: int = 768
    #: uvloop or asyncio.
    event_loop: str = "uvloop"
    #: The longest wait during which the server polls, see `kernel.loop.busy_poll`; 0 for no polling.
    busy_poll_us: int = 500
    #: The size of each arena. An arena is a sparse file: unused bytes take no memory.
    arena_byte_size: int = 1 << 34
    #: The most bytes of tensors in all arenas; 0 for half of the memory of the machine.
    memory_byte_size: int = 0
    #: How many times the bytes of a compressed request its content may have, if that is more than 1 MiB; 0 for no
    #: limit.
    max_decompression_ratio: int = 200
    #: Whether the kernel shares memory with workers; otherwise it sends tensors over connections.
    worker_shared_memory: bool = True
    #: How worker processes start: auto, fork or spawn.
    worker_start: str = "auto"
    #: How many processes serve inference over HTTP and gRPC beside the kernel's process, for ports without TLS.
    front_door_processes: int = 0
    #: The Python environments that models have of their own.
    environments: EnvironmentSettings = EnvironmentSettings()
    launchers: LauncherOptions = LauncherOptions()

    @property
    def protocols_of_front_doors(self) -> list[str]:
        """The protocols that front doors in processes of their own serve; the kernel's process serves TLS."""
        ports = {"http": (self.http_listener, self.http.tls), "grpc": (self.grpc_listener, self.grpc.tls)}
        return [name for name, (listener, tls) in ports.items() if listener.allow and tls is None]

    @property
    def demo(self) -> bool:
        """Whether the server serves the demo models."""
        return self.repository.paths == (DEMO_REPOSITORY,)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_together(files: Mapping[str, Path | None]) -> None:
    """Raise `BadOption` if some of the flags of a certificate are given, and others are not."""
    lacking = [flag for flag, path in files.items() if path is None]
    if lacking and len(lacking) < len(files):
        are = "is" if len(lacking) == 1 else "are"
        raise BadOption(f"{' and '.join(lacking)} {are} missing: {', '.join(files)} are given together or not at all")


def _check_launchers(launchers: LauncherOptions) -> None:
    """Raise `BadOption` for agents without the launcher that uses them, and for what would need a token."""
    if launchers.agents and AGENT not in launchers.others:
        raise BadOption(f"--agents needs --launcher={AGENT}, or a list of launchers with that name or {AUTO}")
    if not launchers.agents and AGENT in launchers.others:
        raise BadOption(f"--launcher={AGENT} needs the addresses of agents (--agents=HOST:PORT,...)")
    if launchers.ray_address and RAY not in launchers.others:
        raise BadOption(f"--ray-address needs --launcher={RAY}, or a list of launchers with that name or {AUTO}")
    if AUTO in launchers.names and not launchers.others:
        raise BadOption(f"--launcher={AUTO} needs other hosts: --agents=HOST:PORT,... or --ray-address")
    files = {
        "--agent-cert-file": launchers.cert_file,
        "--agent-key-file": launchers.key_file,
        "--agent-root-cert-file": launchers.root_cert_file,
    }
    check_together(files)
    if launchers.tls is not None and not {AGENT, RAY} & set(launchers.others):
        raise BadOption(f"--agent-cert-file needs --launcher={AGENT} or {RAY}, or a list of launchers with one of them")
    if launchers.token_file is None:
        for host, port in launchers.agents:
            if not is_loopback(host):
                raise BadOption(f"the agent at {host}:{port} is not on this machine: it needs --agent-token-file")


def check_options(options: ServerOptions) -> None:
    """Raise `BadOption` if options contradict each other, or a repository is not a folder and the start is to fail."""
    for folder in options.repository.paths:
        if isinstance(folder, Path) and not folder.is_dir() and options.repository.exit_on_error:
            # A path has lost the second slash of abfs://.
            shown = re.sub(r"^(\w\w+):/(?!/)", r"\1://", str(folder))
            raise BadOption(f"model repository '{shown}' is not a folder{_hint_for(folder)}")
    try:
        parse_backend_configs(options.repository.backend_config)
    except ServingError as error:
        raise BadOption(error.message) from None
    try:
        parse_host_policies(options.repository.host_policy)
    except ServingError as error:
        raise BadOption(f"setting host policy: {error.code.title} - {error.message}") from None
    try:
        parse_cache_config(options.cache.config, options.cache.local_byte_size)
    except ServingError as error:
        raise BadOption(f"creating server: {error.code.title} - {error.message}") from None
    _check_launchers(options.launchers)
    if options.repository.load_models and options.repository.control_mode != "explicit":
        raise BadOption("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in options.repository.load_models and len(options.repository.load_models) > 1:
        raise BadOption("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    _check_admin(options.admin)
    if options.front_door_processes:
        _check_front_door_processes(options)
    taken: dict[tuple[str, int], str] = {}
    for title, listener in (
        ("HTTP", options.http_listener),
        ("GRPC", options.grpc_listener),
        ("metrics", options.metrics_listener),
        ("OpenAI", options.openai_listener),
    ):
        if not listener.allow:
            continue
        address = (listener.address, listener.port)
        if listener.port and address in taken:
            raise BadOption(
                f"The server cannot listen to {taken[address]} requests and {title} requests at the same address "
                f"and port {listener.address}:{listener.port}"
            )
        taken[address] = title


def _check_front_door_processes(options: ServerOptions) -> None:
    flag = "--front-door-processes"
    if not (options.http_listener.allow or options.grpc_listener.allow):
        raise BadOption(f"{flag} serve inference over HTTP and gRPC, and --allow-http=false --allow-grpc=false "
                        "closes these ports")  # fmt: skip
    if not options.protocols_of_front_doors:
        raise BadOption(f"{flag} cannot serve ports with TLS, and HTTP and gRPC have no other: leave it out, or "
                        "--http-use-ssl or --grpc-use-ssl")  # fmt: skip
    if not options.worker_shared_memory:
        raise BadOption(f"{flag} share memory with workers, and --worker-shared-memory=false leaves them none")


def _hint_for(folder: Path) -> str:
    """Return what to do about a repository that is not a folder."""
    # Imported late: it imports protobuf, which a right command line need not.
    from kernel.repository.path_hints import MODEL_ENDINGS, path_hint

    beside, ending = folder.absolute().parent, folder.suffix
    names_file = ending in MODEL_ENDINGS
    siblings = [
        each.name
        for each in (beside.iterdir() if os.access(beside, os.R_OK | os.X_OK) else ())
        if (each.suffix == ending if names_file else each.is_dir())
    ]
    hint = path_hint(str(folder), is_file=folder.is_file(), siblings=siblings)
    return f": {hint}" if hint else ". Give an existing folder, or none to try the demo models"


def _check_admin(admin: AdminOptions) -> None:
    if admin.access == "key" and not admin.key:
        raise BadOption("--admin-access=key needs --admin-key, the key as @FILE or $VARIABLE")
    if admin.key and admin.access != "key":
        # The server would be open although the operator has chosen a key.
        raise BadOption("--admin-key has an effect only with --admin-access=key")
