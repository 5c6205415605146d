"""The flags that do something, in the groups of the help. Each names the option that it sets."""

from __future__ import annotations

from kernel.command.flags.flag import Flag, FlagGroup
from kernel.command.flags.values import (
    BACKEND_SETTING,
    CAPACITY,
    FILE,
    FOLDER,
    HOST_POLICY,
    INVERTED_SWITCH,
    METRICS_SETTING,
    NAME,
    OFF,
    PORT,
    SWITCH,
    TEXT,
    TRACE_SETTING,
    VERBOSITY,
    Kind,
    one_of,
    whole,
)

_ADDRESS = Kind("ADDRESS", str)
_PATTERN = Kind("REGEX", str)
_RESTRICTION = Kind("APIS:KEY=VALUE", str)
_ORIGIN = Kind("ORIGIN", str)
_MILLISECONDS = whole(0, metavar="MS")
_SECONDS = whole(raised_to=0, metavar="SECONDS")
_COUNT = whole(0)

_CATEGORIES = "health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging"

_MODELS = FlagGroup(
    "Models",
    "Where models are, and which of them are served.",
    (
        Flag(name="model-repository", alias="model-store", kind=FOLDER, option="repository.paths", repeat=True,
             default="demo models", help="Folder of models."),
        Flag(name="model-control-mode", kind=one_of("none", "explicit", "poll", any_case=True),
             option="repository.control_mode",
             help="none: load all models at start, and never again. explicit: load those of --load-model, then what "
             "clients ask for. poll: load all, and see what has changed every --repository-poll-secs."),
        Flag(name="repository-poll-secs", kind=whole(1, metavar="SECONDS"), option="repository.poll_s",
             help="How often poll mode looks at the repositories."),
        Flag(name="load-model", kind=NAME, option="repository.load_models", repeat=True,
             help="A model to load at start in explicit mode; '*' alone for all models."),
        Flag(name="exit-on-error", kind=SWITCH, option="repository.exit_on_error",
             help="End with code 1 where a model cannot be loaded at start."),
        Flag(name="strict-readiness", kind=SWITCH, option="strict_readiness",
             help="Report ready (/v2/health/ready) only while all models are; false: as soon as the server answers."),
        # Before --disable-auto-complete-config, which wins where both are given.
        Flag(name="strict-model-config", kind=INVERTED_SWITCH, option="repository.auto_complete_config",
             default="false", help="Deprecated: --disable-auto-complete-config.",
             note="'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."),
        Flag(name="disable-auto-complete-config", kind=OFF, option="repository.auto_complete_config",
             help="Take config.pbtxt as it is written: nothing is filled in from the model's files."),
        Flag(name="model-config-name", kind=NAME, option="repository.config_name",
             help="Use MODEL/configs/NAME.pbtxt, where there is one, instead of MODEL/config.pbtxt."),
        Flag(name="model-namespacing", kind=SWITCH, option="repository.namespacing",
             help="Let models in different repositories have the same name."),
        Flag(name="model-load-thread-count", kind=whole(0), option="repository.load_thread_count",
             help="Models that are loaded at the same time."),
        Flag(name="model-load-retry-count", kind=whole(raised_to=0), option="repository.load_retry_count",
             help="How often a model is tried again that cannot be loaded."),
        Flag(name="model-load-timeout-secs", kind=_COUNT, option="repository.load_timeout_s", ours=True,
             help="Seconds that a step of loading may take (completing the configuration, initialize, warm-up); 0 for "
             "no limit."),
        Flag(name="backend-config", kind=BACKEND_SETTING, option="repository.backend_config", repeat=True,
             help="A setting of a backend, or of all."),
        Flag(name="host-policy", kind=HOST_POLICY, option="repository.host_policy", repeat=True,
             help="Where instances of a host policy run: KEY is numa-node or cpu-cores."),
    ),
)  # fmt: skip

_HTTP = FlagGroup(
    "HTTP",
    "",
    (
        Flag(name="allow-http", kind=SWITCH, option="http_listener.allow", help="Serve HTTP."),
        Flag(name="http-address", kind=_ADDRESS, option="http_listener.address", help="Address to listen at."),
        Flag(name="http-port", kind=PORT, option="http_listener.port", help="Port; 0 for any free one."),
        Flag(name="reuse-http-port", kind=SWITCH, option="http_listener.reuse_port",
             help="Share the port with other servers that are started with this flag."),
        Flag(name="http-max-input-size", kind=whole(1, 2**63 - 1, metavar="BYTES"), option="http.max_input_size",
             help="Largest JSON, raw or inflated body. Binary tensors behind JSON are not limited."),
        Flag(name="http-header-forward-pattern", kind=_PATTERN, option="http.header_forward_pattern",
             help="Inference requests get the headers whose names match as parameters."),
        Flag(name="http-restricted-api", kind=_RESTRICTION, option="http.restricted_api", repeat=True,
             help="Answer APIS only to requests with the header KEY: VALUE. "
             f"APIS is a list with commas of {_CATEGORIES}."),
        Flag(name="http-cors-origin", kind=_ORIGIN, option="http.cors_origins", repeat=True,
             help="Let web pages of this origin call the server, such as https://a.example; * for all.", ours=True),
        Flag(name="http-use-ssl", kind=SWITCH, option="http.tls",
             help="Serve HTTPS with the certificate below.", ours=True),
        Flag(name="http-use-ssl-mutual", kind=SWITCH, option="http.tls.mutual",
             help="Serve HTTPS, and ask clients for a certificate.", ours=True),
        Flag(name="http-server-cert", kind=FILE, option="http.tls.certificate", help="Certificate chain, PEM.",
             ours=True),
        Flag(name="http-server-key", kind=FILE, option="http.tls.key", help="Its key, PEM, without passphrase.",
             ours=True),
        Flag(name="http-root-cert", kind=FILE, option="http.tls.client_ca",
             help="Who signs the certificates of clients, PEM.", ours=True),
    ),
)  # fmt: skip

_GRPC = FlagGroup(
    "gRPC",
    "",
    (
        Flag(name="allow-grpc", kind=SWITCH, option="grpc_listener.allow", help="Serve gRPC."),
        Flag(name="grpc-address", kind=_ADDRESS, option="grpc_listener.address", help="Address to listen at."),
        Flag(name="grpc-port", kind=PORT, option="grpc_listener.port", help="Port; 0 for any free one."),
        Flag(name="reuse-grpc-port", kind=SWITCH, option="grpc_listener.reuse_port",
             help="Share the port with other servers that are started with this flag."),
        Flag(name="grpc-header-forward-pattern", kind=_PATTERN, option="grpc.header_forward_pattern",
             help="Inference requests get the metadata whose names match as parameters."),
        Flag(name="grpc-restricted-protocol", kind=_RESTRICTION, option="grpc.restricted_protocol", repeat=True,
             help="Answer APIS (see --http-restricted-api) only to calls with metadata triton-grpc-protocol-KEY: "
             "VALUE."),
        Flag(name="grpc-use-ssl", kind=SWITCH, option="grpc.tls", help="Use TLS with the certificate below."),
        Flag(name="grpc-use-ssl-mutual", kind=SWITCH, option="grpc.tls.mutual",
             help="Use TLS, and ask clients for a certificate."),
        Flag(name="grpc-server-cert", kind=FILE, option="grpc.tls.certificate", help="Certificate chain, PEM."),
        Flag(name="grpc-server-key", kind=FILE, option="grpc.tls.key", help="Its key, PEM, without passphrase."),
        Flag(name="grpc-root-cert", kind=FILE, option="grpc.tls.client_ca",
             help="Who signs the certificates of clients, PEM."),
        Flag(name="grpc-infer-response-compression-level",
             kind=one_of("none", "low", "medium", "high", any_case=True),
             option="grpc.infer_response_compression_level", help="How responses of inference are compressed."),
        Flag(name="grpc-max-response-pool-size", kind=whole(1), option="grpc.max_response_pool_size",
             default="no limit", help="Responses of a stream that wait for a slow client before its model waits, too."),
        Flag(name="grpc-keepalive-time", kind=whole(1, metavar="MS"), option="grpc.keepalive_time_ms",
             help="Ping a client that has been silent for so long."),
        Flag(name="grpc-keepalive-timeout", kind=whole(1, metavar="MS"), option="grpc.keepalive_timeout_ms",
             help="Close the connection of a client that does not answer a ping within this time."),
        Flag(name="grpc-keepalive-permit-without-calls", kind=SWITCH, option="grpc.keepalive_permit_without_calls",
             help="Ping also clients without calls, and let them ping."),
        Flag(name="grpc-http2-max-pings-without-data", kind=_COUNT, option="grpc.http2_max_pings_without_data",
             help="Pings that are sent while there is no data to send; 0 for no limit."),
        Flag(name="grpc-http2-min-recv-ping-interval-without-data", kind=_MILLISECONDS,
             option="grpc.http2_min_recv_ping_interval_without_data_ms",
             help="A client without calls that pings more often gets a strike for each ping."),
        Flag(name="grpc-http2-max-ping-strikes", kind=_COUNT, option="grpc.http2_max_ping_strikes",
             help="Strikes after which a connection is closed; 0 for any number."),
        Flag(name="grpc-max-connection-age", kind=_MILLISECONDS, option="grpc.max_connection_age_ms", default="no end",
             help="Close connections that are older."),
        Flag(name="grpc-max-connection-age-grace", kind=_MILLISECONDS, option="grpc.max_connection_age_grace_ms",
             default="no end", help="What calls on such connections get to end."),
    ),
)  # fmt: skip

_METRICS = FlagGroup(
    "Metrics",
    "",
    (
        Flag(name="allow-metrics", kind=SWITCH, option="metrics_listener.allow", help="Serve /metrics for Prometheus."),
        Flag(name="metrics-address", kind=_ADDRESS, option="metrics_listener.address", default="that of HTTP",
             help="Address to listen at."),
        Flag(name="metrics-port", kind=PORT, option="metrics_listener.port", help="Port; 0 for any free one."),
        Flag(name="allow-cpu-metrics", kind=SWITCH, option="metrics.allow_cpu_metrics",
             help="Show processor and memory figures."),
        Flag(name="metrics-interval-ms", kind=whole(1, metavar="MS"), option="metrics.interval_ms",
             help="How often these figures are measured."),
        Flag(name="metrics-config", kind=METRICS_SETTING, option="metrics.config", repeat=True,
             help="A setting of metrics, such as counter_latencies=false or summary_latencies=true."),
    ),
)  # fmt: skip

_LOG = FlagGroup(
    "Log",
    "Information goes to standard output; warnings and errors to standard error. Clients can change all but the file "
    "while the server runs (/v2/logging).",
    (
        Flag(name="log-verbose", kind=VERBOSITY, option="log.verbose", help="Verbose level; 0 for none."),
        Flag(name="log-info", kind=SWITCH, option="log.info", help="Log information."),
        Flag(name="log-warning", kind=SWITCH, option="log.warning", help="Log warnings."),
        Flag(name="log-error", kind=SWITCH, option="log.error", help="Log errors."),
        Flag(name="log-format", kind=one_of("default", "ISO8601", "json"), option="log.format",
             help="Form of a line. json: one object with request id, model and version where they are known."),
        Flag(name="log-file", kind=Kind("FILE", str), option="log.file", help="Append all lines to this file instead."),
        Flag(name="log-access", kind=SWITCH, option="log.access",
             help="Log every HTTP request and gRPC call.", ours=True),
    ),
)  # fmt: skip


def _old_trace_flag(name: str, kind: Kind, instead: str, *, repeat: bool = False) -> Flag:
    return Flag(
        name=f"trace-{name}", kind=kind, option="trace", repeat=repeat, help=f"Deprecated: --trace-config {instead}.",
        note=f"'--trace-{name}' has been deprecated. Please use '--trace-config {instead}' instead.",
    )  # fmt: skip


_TRACES = FlagGroup(
    "Traces",
    "Traces are not recorded yet. Settings are kept, and clients see them (/v2/trace/setting).",
    (
        Flag(name="trace-config", kind=TRACE_SETTING, option="trace", repeat=True,
             help="Traces are not recorded yet: a level other than OFF is shown to clients and has no other effect. "
             "level=OFF|TIMESTAMPS|TENSORS, rate=N (one request of N), count=N (-1 for no end), "
             "mode=triton|opentelemetry; triton,file=FILE; triton,log-frequency=N; opentelemetry,url=URL; "
             "opentelemetry,resource=KEY=VALUE."),
        _old_trace_flag("file", TEXT, "triton,file=FILE"),
        _old_trace_flag("level", TEXT, "level=LEVEL", repeat=True),
        _old_trace_flag("rate", TEXT, "rate=N"),
        _old_trace_flag("count", TEXT, "count=N"),
        _old_trace_flag("log-frequency", TEXT, "triton,log-frequency=N"),
    ),
)  # fmt: skip

_SERVER = FlagGroup(
    "Server",
    "",
    (
        Flag(name="id", kind=TEXT, option="server_id", help="Name of the server in its metadata."),
        Flag(name="exit-timeout-secs", kind=_SECONDS, option="exit_timeout_s",
             help="What requests get to end after Ctrl-C or SIGTERM."),
        Flag(name="allow-client-shm", kind=one_of("local", "true", "false", any_case=True), option="allow_client_shm",
             ours=True, help="Who may register shared memory; local: clients on this machine. In tritonserver false, "
             "and there is no local."),
        Flag(name="event-loop", kind=one_of("uvloop", "asyncio"), option="event_loop",
             help="What runs the server; uvloop is faster.", ours=True),
        Flag(name="busy-poll-us", kind=whole(0, 1_000_000, metavar="US"), option="busy_poll_us", ours=True,
             help="The longest wait, for a worker, a client or a batch to fill, through which the server polls instead "
             "of sleeping. It polls only while the last waits were as short, and gives way to other processes; 0 never "
             "to poll."),
        Flag(name="arena-byte-size", kind=CAPACITY, option="arena_byte_size", default="half of the memory",
             ours=True,
             help="The most that tensors of one model's requests may take; the power of two below."),
        Flag(name="worker-shared-memory", kind=SWITCH, option="worker_shared_memory", ours=True,
             help="Whether large tensors go to workers through shared memory; false sends them over connections, as to "
             "workers of other hosts, which is slower."),
    ),
)  # fmt: skip

GROUPS = (_MODELS, _HTTP, _GRPC, _METRICS, _LOG, _TRACES, _SERVER)
