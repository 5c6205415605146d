"""The flags that have an effect, in the groups of the help. Each one names the option that it sets.

tritonserver's flags that have no effect in this server, each with its reason. Their values are still checked.
"""

from __future__ import annotations

from kernel.flags.flag import (
    ADDRESSES,
    BACKEND_SETTING,
    BUDGET,
    BYTES,
    CACHE_SETTING,
    CAPACITY,
    DURATION,
    FILE,
    FOLDER,
    HOST_POLICY,
    INVERTED_SWITCH,
    LAUNCHERS,
    METRICS_SETTING,
    NAME,
    NUMBER,
    OFF,
    PORT,
    RECORDING,
    REPOSITORY,
    RESOURCE,
    SWITCH,
    TEXT,
    TRACE_SETTING,
    VERBOSITY,
    Flag,
    FlagGroup,
    Kind,
    integer,
    one_of,
    pair,
)
from kernel.options import CHAT_DEMO_REPOSITORY, DEMO_REPOSITORY

_ADDRESS = Kind("ADDRESS", str)

_PATTERN = Kind("REGEX", str)

_RESTRICTION = Kind("APIS:KEY=VALUE", str)

_ORIGIN = Kind("ORIGIN", str)

_HOSTS = Kind("NAMES", str)

_KEY = Kind("@FILE|$VARIABLE|TEXT", str)

_MILLISECONDS = integer(0, metavar="MS")

_SECONDS = integer(raised_to=0, metavar="SECONDS")

_COUNT = integer(0)

_BYTES = integer(0, metavar="BYTES")

_GPU = integer(0, metavar="GPU")

#: Name → its repository.
_DEMOS = {"models": DEMO_REPOSITORY, "chat": CHAT_DEMO_REPOSITORY}

_DEMO = Kind("|".join(_DEMOS), lambda text: (_DEMOS[str(one_of(*_DEMOS).parse(text))],))

_CATEGORIES = "health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging"

_MODELS = FlagGroup(
    "Models",
    "Model repositories, and which of their models are served.",
    (
        Flag(name="demo", kind=_DEMO, option="repository.paths", ours=True, default="none",
             help="Serve models of the package: models (those without any repository), or chat (a streaming chat over "
             "OpenAI's API)."),
        Flag(name="model-repository", alias="model-store", kind=REPOSITORY, option="repository.paths",
             repeat=True, default="demo models",
             help="Folder of models, or an address in a cloud: s3://BUCKET/FOLDER, "
             "s3://https://HOST:PORT/BUCKET/FOLDER, gs://BUCKET/FOLDER, as://ACCOUNT/CONTAINER/FOLDER "
             "(docs/clouds.md)."),
        Flag(name="repository-copies", kind=TEXT, option="repository.copies", ours=True,
             default="a temporary folder",
             help="The folder for copies of models from clouds. They stay there for the next start; servers may share "
             "it."),
        Flag(name="model-control-mode", kind=one_of("none", "explicit", "poll", any_case=True),
             option="repository.control_mode",
             help="none: load all models at start, and never again. explicit: load the models of --load-model at "
             "start; clients load and unload models. poll: load all models at start, and follow changes of the "
             "repositories (--repository-poll-secs)."),
        Flag(name="repository-poll-secs", kind=integer(1, metavar="SECONDS"), option="repository.poll_s",
             help="Seconds between two checks of the repositories in poll mode."),
        Flag(name="load-model", kind=NAME, option="repository.load_models", repeat=True,
             help="A model to load at start in explicit mode; '*' alone for all models."),
        Flag(name="exit-on-error", kind=SWITCH, option="repository.exit_on_error",
             help="Exit with code 1 if a model cannot be loaded at start."),
        Flag(name="strict-readiness", kind=SWITCH, option="strict_readiness",
             help="true: the server is ready (/v2/health/ready) while all models are ready. false: it is ready as soon "
             "as it responds."),
        # Before --disable-auto-complete-config, which takes precedence if both are given.
        Flag(name="strict-model-config", kind=INVERTED_SWITCH, option="repository.auto_complete_config",
             default="false", help="Deprecated: --disable-auto-complete-config.",
             note="'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."),
        Flag(name="disable-auto-complete-config", kind=OFF, option="repository.auto_complete_config",
             help="Use config.pbtxt as it is written; do not complete it from the model's files."),
        Flag(name="model-config-name", kind=NAME, option="repository.config_name",
             help="Use MODEL/configs/NAME.pbtxt, if it exists, instead of MODEL/config.pbtxt."),
        Flag(name="model-namespacing", kind=SWITCH, option="repository.namespacing",
             help="Let models in different repositories have the same name."),
        Flag(name="model-load-thread-count", kind=integer(0), option="repository.load_thread_count",
             help="The most models that load at the same time. Loads that wait and use no processor do not count."),
        Flag(name="model-load-retry-count", kind=integer(raised_to=0), option="repository.load_retry_count",
             help="How often a failed load is repeated."),
        Flag(name="model-load-timeout-secs", kind=_COUNT, option="repository.load_timeout_s", ours=True,
             help="Seconds that each step of a load may take (completing the configuration, initialize, warm-up); 0 "
             "for no limit."),
        Flag(name="model-unload-timeout-secs", kind=_SECONDS, option="repository.unload_timeout_s", ours=True,
             help="Seconds that the last requests of an unloaded or replaced model may take. Then they fail, and the "
             "model's workers are killed."),
        Flag(name="backend-config", kind=BACKEND_SETTING, option="repository.backend_config", repeat=True,
             help="A setting of one backend, or without BACKEND of all backends."),
        Flag(name="allow-pickle", kind=Kind("true|false|MODEL,...", str), option="repository.allow_pickle", ours=True,
             help="Which models may be loaded from pickles (.pkl, .pickle, .joblib), or by code that a folder of "
             "MLflow names. A pickle runs code when it is loaded, so allow it only for models that you have made "
             "(docs/sklearn.md)."),
        Flag(name="backend-directory", kind=FOLDER, option="repository.backend_directory", default="none",
             help="A folder with a folder for each backend that is a file: NAME/backend.py, or NAME/model.py for a "
             "Python-based backend (docs/backends.md)."),
        Flag(name="host-policy", kind=HOST_POLICY, option="repository.host_policy", repeat=True,
             help="The processors for instances with a host policy: KEY is numa-node or cpu-cores."),
        Flag(name="install-requirements", kind=SWITCH, option="environments.installs", ours=True,
             help="Install the packages of a requirements.txt or pyproject.toml beside a model.py, in an environment "
             "of the model's own. Never done for files of a load request."),
        Flag(name="environment-cache-directory", kind=TEXT, option="environments.cache_folder", ours=True,
             default="~/.cache/naiad/environments",
             help="The folder in which environments of models are created; servers may share it."),
        Flag(name="environment-cache-byte-size", kind=BYTES, option="environments.cache_byte_size", ours=True,
             help="The most bytes of all these environments together. Those that were not used for the longest time "
             "are removed first."),
        Flag(name="environment-timeout-secs", kind=_COUNT, option="environments.timeout_s", ours=True,
             help="Seconds that unpacking or installing an environment may take; 0 for no limit."),
    ),
)  # fmt: skip

_SCHEDULING = FlagGroup(
    "Response cache and rate limiter",
    "For models whose configuration has response_cache or instance_group.rate_limiter.",
    (
        Flag(name="cache-config", kind=CACHE_SETTING, option="cache.config", repeat=True, default="no cache",
             help="A setting of the response cache: local,size=BYTES in the memory of the server, redis,host=NAME "
             "(port, user, password, ...) in Redis, or a cache of an installed package (docs/caches.md)."),
        Flag(name="response-cache-byte-size", kind=BYTES, option="cache.local_byte_size", default="no cache",
             help="Deprecated: --cache-config=local,size=BYTES.",
             note="'--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
             "implementation with the provided byte size for its config. Please use '--cache-config' instead."),
        Flag(name="rate-limit", kind=one_of("off", "execution_count", any_case=True), option="rate_limit.mode",
             help="execution_count: instances execute when the resources of their rate_limiter are free, those with "
             "the fewest executions times priority first. off: whenever they are idle."),
        Flag(name="rate-limit-resource", kind=RESOURCE, option="rate_limit.resources", repeat=True,
             default="the most that an instance needs",
             help="The amount of a resource, for each device or for one. If the flag is given, resources that it does "
             "not name do not exist."),
    ),
)  # fmt: skip

_HTTP = FlagGroup(
    "HTTP",
    "",
    (
        Flag(name="allow-http", kind=SWITCH, option="http_listener.allow", help="Serve HTTP."),
        Flag(name="http-address", kind=_ADDRESS, option="http_listener.address", help="Address to listen on."),
        Flag(name="http-port", kind=PORT, option="http_listener.port", help="Port; 0 for any free one."),
        Flag(name="reuse-http-port", kind=SWITCH, option="http_listener.reuse_port",
             help="Share the port with other servers that are started with this flag."),
        Flag(name="http-max-input-size", kind=integer(1, 2**63 - 1, metavar="BYTES"), option="http.max_input_size",
             help="The largest request body (JSON, raw, or after decompression). Binary tensors after JSON are not "
             "limited."),
        Flag(name="http-header-forward-pattern", kind=_PATTERN, option="http.header_forward_pattern",
             help="Headers whose names contain a match become parameters of inference requests."),
        Flag(name="http-restricted-api", kind=_RESTRICTION, option="http.restricted_api", repeat=True,
             help="Allow APIS only for requests with the header KEY: VALUE. "
             f"APIS is a comma-separated list of {_CATEGORIES}, metrics (the metrics port). VALUE may be @FILE or "
             "$VARIABLE."),
        Flag(name="http-cors-origin", kind=_ORIGIN, option="http.cors_origins", repeat=True,
             help="Allow web pages of this origin to call the server, such as https://a.example; * for all.",
             ours=True),
        Flag(name="http-allowed-hosts", kind=_HOSTS, option="http.allowed_hosts", repeat=True, ours=True,
             help="Names by which clients may reach the HTTP and metrics ports, with commas between them, besides IP "
             "addresses and localhost; *.example.com for all names below example.com, * for any. Requests by other "
             "names are refused. Without the flag, only web pages that use a name which could be an attacker's are "
             "refused."),
        Flag(name="http-dashboard", kind=SWITCH, option="http.dashboard", ours=True,
             help="Serve a page at / and /dashboard that shows models, requests, instances and logs."),
        Flag(name="http-use-ssl", kind=SWITCH, option="http.tls",
             help="Serve HTTPS with --http-server-cert.", ours=True),
        Flag(name="http-use-ssl-mutual", kind=SWITCH, option="http.tls.mutual",
             help="Serve HTTPS, and require a certificate from clients.", ours=True),
        Flag(name="http-server-cert", kind=FILE, option="http.tls.certificate",
             help="The server's certificate chain (PEM).", ours=True),
        Flag(name="http-server-key", kind=FILE, option="http.tls.key",
             help="The certificate's private key (PEM), without passphrase.", ours=True),
        Flag(name="http-root-cert", kind=FILE, option="http.tls.client_ca",
             help="The certificate authority of the clients (PEM).", ours=True),
    ),
)  # fmt: skip

_GRPC = FlagGroup(
    "gRPC",
    "",
    (
        Flag(name="allow-grpc", kind=SWITCH, option="grpc_listener.allow", help="Serve gRPC."),
        Flag(name="grpc-address", kind=_ADDRESS, option="grpc_listener.address", help="Address to listen on."),
        Flag(name="grpc-port", kind=PORT, option="grpc_listener.port", help="Port; 0 for any free one."),
        Flag(name="reuse-grpc-port", kind=SWITCH, option="grpc_listener.reuse_port",
             help="Share the port with other servers that are started with this flag."),
        Flag(name="grpc-header-forward-pattern", kind=_PATTERN, option="grpc.header_forward_pattern",
             help="Metadata whose names contain a match become parameters of inference requests."),
        Flag(name="grpc-restricted-protocol", kind=_RESTRICTION, option="grpc.restricted_protocol", repeat=True,
             help="Allow APIS (see --http-restricted-api) only for calls with the metadata triton-grpc-protocol-KEY: "
             "VALUE, which may be @FILE or $VARIABLE."),
        Flag(name="grpc-use-ssl", kind=SWITCH, option="grpc.tls", help="Use TLS with --grpc-server-cert."),
        Flag(name="grpc-use-ssl-mutual", kind=SWITCH, option="grpc.tls.mutual",
             help="Use TLS, and require a certificate from clients."),
        Flag(name="grpc-server-cert", kind=FILE, option="grpc.tls.certificate",
             help="The server's certificate chain (PEM)."),
        Flag(name="grpc-server-key", kind=FILE, option="grpc.tls.key",
             help="The certificate's private key (PEM), without passphrase."),
        Flag(name="grpc-root-cert", kind=FILE, option="grpc.tls.client_ca",
             help="The certificate authority of the clients (PEM)."),
        Flag(name="grpc-infer-response-compression-level",
             kind=one_of("none", "low", "medium", "high", any_case=True),
             option="grpc.infer_response_compression_level", help="Compression of inference responses."),
        Flag(name="grpc-max-response-pool-size", kind=integer(1), option="grpc.max_response_pool_size",
             default="no limit", help="Responses of a stream that may wait for a slow client; then the model waits."),
        Flag(name="grpc-keepalive-time", kind=integer(1, metavar="MS"), option="grpc.keepalive_time_ms",
             help="Send a ping to a client that has sent nothing for this time."),
        Flag(name="grpc-keepalive-timeout", kind=integer(1, metavar="MS"), option="grpc.keepalive_timeout_ms",
             help="Close the connection of a client that does not acknowledge a ping within this time."),
        Flag(name="grpc-keepalive-permit-without-calls", kind=SWITCH, option="grpc.keepalive_permit_without_calls",
             help="Send pings also to clients without calls, and allow their pings."),
        Flag(name="grpc-http2-max-pings-without-data", kind=_COUNT, option="grpc.http2_max_pings_without_data",
             help="The most pings in a row that the server sends without data between them; 0 for no limit."),
        Flag(name="grpc-http2-min-recv-ping-interval-without-data", kind=_MILLISECONDS,
             option="grpc.http2_min_recv_ping_interval_without_data_ms",
             help="A client without calls gets a strike for each ping within this time after another."),
        Flag(name="grpc-http2-max-ping-strikes", kind=_COUNT, option="grpc.http2_max_ping_strikes",
             help="Strikes after which the server closes a connection; 0 for never."),
        Flag(name="grpc-max-connection-age", kind=_MILLISECONDS, option="grpc.max_connection_age_ms",
             default="no limit", help="Close connections after this time."),
        Flag(name="grpc-max-connection-age-grace", kind=_MILLISECONDS, option="grpc.max_connection_age_grace_ms",
             default="no limit", help="How long calls on such a connection may still take."),
    ),
)  # fmt: skip

_OPENAI = FlagGroup(
    "OpenAI",
    "OpenAI's API for models that generate text (docs/openai.md). Limits, restrictions and TLS are those of HTTP.",
    (
        Flag(name="allow-openai", kind=SWITCH, option="openai_listener.allow", ours=True,
             help="Serve OpenAI's API. --openai-port and --demo=chat do so, too."),
        Flag(name="openai-address", kind=_ADDRESS, option="openai_listener.address", default="that of HTTP", ours=True,
             help="Address to listen on."),
        Flag(name="openai-port", kind=PORT, option="openai_listener.port", ours=True,
             help="Serve OpenAI's API on this port; 0 for any free one."),
        Flag(name="openai-default-max-tokens", kind=integer(1, metavar="TOKENS"), option="openai.default_max_tokens",
             ours=True, default="16 for completions, none for chats",
             help="The most tokens of a response if the client does not say it."),
        Flag(name="openai-api-keys", kind=FILE, option="openai.api_keys", ours=True, default="none",
             help="Only clients with a key of this file (Authorization: Bearer KEY) may use OpenAI's API. Lines: NAME "
             "KEY, and the models that the key may use. A changed file is read again."),
    ),
)  # fmt: skip

_GPUS = FlagGroup(
    "GPUs",
    "Instances on GPUs, and their memory.",
    (
        Flag(name="min-supported-compute-capability", kind=NUMBER, option="gpus.least_capability",
             help="GPUs with a lower compute capability are not used."),
        Flag(name="gpu-kind", kind=one_of("gpu", "cpu"), option="gpus.kind", ours=True,
             help="cpu: instances of KIND_GPU run on the CPU, to try a repository on a machine without a GPU."),
        Flag(name="gpu-instances", kind=one_of("threads", "processes"), option="gpus.instances", ours=True,
             help="threads: several instances of an ONNX model on one GPU are threads of one process, with a stream "
             "each, and compute at the same time. processes: each instance is a process."),
        Flag(name="model-load-gpu-limit", kind=pair("GPU:FRACTION", ":", _GPU, NUMBER), option="gpus.load_limits",
             repeat=True, default="no limit",
             help="No instance is loaded on a GPU while a larger part of its memory is in use."),
        Flag(name="pinned-memory-pool-byte-size", kind=BYTES, option="gpus.pinned_byte_size",
             help="The most pinned host memory of all instances together. Copies to GPUs go through it."),
        Flag(name="cuda-memory-pool-byte-size", kind=pair("GPU:BYTES", ":", _GPU, BYTES),
             option="gpus.pool_byte_sizes", repeat=True, default="67108864 for each GPU",
             help="Memory of a GPU that an instance keeps: for inputs of a batch, and for tensors to other models."),
    ),
)  # fmt: skip

_METRICS = FlagGroup(
    "Metrics",
    "",
    (
        Flag(name="allow-metrics", kind=SWITCH, option="metrics_listener.allow", help="Serve /metrics for Prometheus."),
        Flag(name="metrics-address", kind=_ADDRESS, option="metrics_listener.address", default="that of HTTP",
             help="Address to listen on."),
        Flag(name="metrics-port", kind=PORT, option="metrics_listener.port", help="Port; 0 for any free one."),
        Flag(name="allow-cpu-metrics", kind=SWITCH, option="metrics.allow_cpu_metrics",
             help="Show CPU and memory figures."),
        Flag(name="allow-gpu-metrics", kind=SWITCH, option="metrics.allow_gpu_metrics",
             help="Show figures of GPUs."),
        Flag(name="metrics-interval-ms", kind=integer(1, metavar="MS"), option="metrics.interval_ms",
             help="Time between two measurements of these figures."),
        Flag(name="metrics-config", kind=METRICS_SETTING, option="metrics.config", repeat=True,
             help="A setting of metrics, such as counter_latencies=false or summary_latencies=true."),
    ),
)  # fmt: skip

_LOG = FlagGroup(
    "Log",
    "Information goes to standard output; warnings and errors to standard error. While the server runs, clients can "
    "change all settings except the file (/v2/logging).",
    (
        Flag(name="log-verbose", kind=VERBOSITY, option="log.verbose", help="Verbose level; 0 for none."),
        Flag(name="log-info", kind=SWITCH, option="log.info", help="Log information."),
        Flag(name="log-warning", kind=SWITCH, option="log.warning", help="Log warnings."),
        Flag(name="log-error", kind=SWITCH, option="log.error", help="Log errors."),
        Flag(name="log-format", kind=one_of("default", "ISO8601", "json"), option="log.format",
             help="Format of a line. json: one object, with request id, model and version if they are known."),
        Flag(name="log-file", kind=Kind("FILE", str), option="log.file", help="Append all lines to this file."),
        Flag(name="log-access", kind=SWITCH, option="log.access",
             help="Log every HTTP request and gRPC call.", ours=True),
        Flag(name="log-model-lines", kind=_COUNT, option="log.model_lines_per_s", ours=True,
             help="The most lines per second that the log takes from one model instance, and after a quiet time ten "
             "times as many; the rest is dropped and counted. 0 for no limit."),
        Flag(name="log-model-bytes", kind=_BYTES, option="log.model_bytes_per_s", ours=True,
             help="The same for bytes per second."),
    ),
)  # fmt: skip


def _old_trace_flag(name: str, kind: Kind, instead: str, *, repeat: bool = False) -> Flag:
    return Flag(
        name=f"trace-{name}", kind=kind, option="trace", repeat=repeat, help=f"Deprecated: --trace-config {instead}.",
        note=f"'--trace-{name}' has been deprecated. Please use '--trace-config {instead}' instead.",
    )  # fmt: skip


_TRACES = FlagGroup(
    "Traces",
    "Clients may change most of these (/v2/trace/setting). `naiad trace FILE` summarizes trace files.",
    (
        Flag(name="trace-config", kind=TRACE_SETTING, option="trace", repeat=True,
             help="level=OFF|TIMESTAMPS|TENSORS, rate=N (one request of N), count=N (-1 for no limit), "
             "mode=triton|opentelemetry; triton,file=FILE; triton,log-frequency=N; opentelemetry,url=URL; "
             "opentelemetry,resource=KEY=VALUE."),
        _old_trace_flag("file", TEXT, "triton,file=FILE"),
        _old_trace_flag("level", TEXT, "level=LEVEL", repeat=True),
        _old_trace_flag("rate", TEXT, "rate=N"),
        _old_trace_flag("count", TEXT, "count=N"),
        _old_trace_flag("log-frequency", TEXT, "triton,log-frequency=N"),
        Flag(name="record", kind=RECORDING, option="record", ours=True, default="off",
             help="Record requests and responses into files of this folder, for `naiad replay DIR --to HOST:PORT`. "
             "size=1GiB (of all files; the oldest are removed), rate=N (one request of N), rate:MODEL=N, "
             "tensors=value|digest, inputs=, outputs= (as tensors=), tensor-limit=1MiB. The files have what clients "
             "send."),
    ),
)  # fmt: skip

_SERVER = FlagGroup(
    "Server",
    "",
    (
        Flag(name="id", kind=TEXT, option="server_id", help="Name of the server in its metadata."),
        Flag(name="state-directory", kind=FOLDER, option="state_directory", ours=True, default="none",
             help="A folder in which traffic rules of clients and rollouts outlive the server. It is created."),
        Flag(name="listen-while-loading", kind=SWITCH, option="listen_while_loading", ours=True,
             help="true: the ports listen while the models of the start load; the server is live, and ready when all "
             "are loaded. false: they listen when the models are loaded, as in tritonserver."),
        Flag(name="exit-timeout-secs", kind=_SECONDS, option="exit_timeout_s",
             help="Seconds that requests in flight may take after Ctrl-C, SIGTERM or SIGHUP."),
        Flag(name="admin-access", kind=one_of("local", "key", "open", any_case=True), option="admin.access", ours=True,
             help="Clients that may load and unload models, change settings of logs and traces, and register shared "
             "memory: local (clients on this machine), key (those with the key of --admin-key in the header admin-key, "
             "over gRPC triton-grpc-protocol-admin-key) or open (all)."),
        Flag(name="admin-key", kind=_KEY, option="admin.key", ours=True, default="none",
             help="The key for --admin-access=key: @FILE, $VARIABLE, or the key itself, which other users of the "
             "machine can see."),
        Flag(name="execution-timeout", kind=DURATION, option="execution_timeout_s", ours=True,
             help="Seconds that a model may execute a batch. Then its requests fail, and its worker is ended and "
             "started again; 0 for no limit. A model's parameter naiad.execution_timeout takes precedence."),
        Flag(name="response-wait-timeout", kind=DURATION, option="response_wait_timeout_s", ours=True,
             help="Seconds that a decoupled model waits for a client that does not read its responses. Then the "
             "request fails and is cancelled, so that the model's instance is free for others; 0 for no limit."),
        Flag(name="execution-report-secs", kind=DURATION, option="execution_report_s", ours=True,
             help="Seconds after which an execution is reported in the log, the metrics and the repository index; 0 "
             "for never."),
        Flag(name="allow-client-shm", kind=one_of("local", "true", "false", any_case=True), option="allow_client_shm",
             ours=True, help="Clients that may register shared memory: local (clients on this machine), true (all) or "
             "false (none). tritonserver's default is false, and it has no local."),
        Flag(name="shared-memory-owner", kind=one_of("any", "peer", any_case=True), option="shared_memory_owner",
             ours=True, help="Who may use, list, replace and unregister a region: any client, or only the one that has "
             "registered it: the same user on this machine, or the same address."),
        Flag(name="shared-memory-regions-per-peer", kind=_COUNT, option="regions_per_peer", ours=True,
             help="The most regions that one client may register, of 1024 for all; 0 for no limit. A client is a user "
             "on this machine, or an address."),
        Flag(name="event-loop", kind=one_of("uvloop", "asyncio"), option="event_loop",
             help="The event loop of the server; uvloop is faster.", ours=True),
        Flag(name="busy-poll-us", kind=integer(0, 1_000_000, metavar="US"), option="busy_poll_us", ours=True,
             help="The longest wait (for a worker, a client, or a batch to fill) during which the server polls instead "
             "of sleeping. It polls only after waits that were as short, and yields to other processes; 0 for no "
             "polling."),
        Flag(name="arena-byte-size", kind=CAPACITY, option="arena_byte_size", ours=True,
             help="The most memory for the tensors of one model's requests, rounded down to a power of two."),
        Flag(name="max-decompression-ratio", kind=integer(0, 2**31 - 1, metavar="TIMES"),
             option="max_decompression_ratio", ours=True,
             help="How many times larger than its compressed body a request may be, if its content has more than "
             "1 MiB; 0 for no limit."),
        Flag(name="memory-byte-size", kind=BUDGET, option="memory_byte_size", ours=True,
             help="The most memory for all requests together, with their tensors; 0 for half of the memory of the "
             "machine, or of the container if it has less. Requests beyond it fail."),
        Flag(name="worker-shared-memory", kind=SWITCH, option="worker_shared_memory", ours=True,
             help="true: large tensors go to workers through shared memory. false: they are sent over connections, as "
             "to workers on other hosts; this is slower."),
        Flag(name="front-door-processes", kind=integer(0, 64), option="front_door_processes", ours=True,
             help="How many processes receive, decode and answer inference requests over HTTP and gRPC beside the "
             "kernel's process, which serves everything else and ports with TLS (docs/scaling.md). For machines with "
             "four cores or more."),
        Flag(name="worker-start", kind=one_of("auto", "fork", "spawn"), option="worker_start", ours=True,
             help="How worker processes start. fork: as copies of a process that has imported what they need, which "
             "takes milliseconds. spawn: each as a new Python interpreter. auto: fork, except for instances on GPUs."),
        Flag(name="launcher", kind=LAUNCHERS, option="launchers.names", ours=True, default="local",
             help="What starts the workers of models: local (on this machine), agent (on other hosts, see --agents), "
             "ray (where a Ray cluster has room), auto (on this machine while it has room, then elsewhere), or a "
             "launcher of an installed package. The first name is the default; a model chooses another one by its "
             "parameter naiad.launcher (docs/remote-workers.md)."),
        Flag(name="agents", kind=ADDRESSES, option="launchers.agents", ours=True, default="none",
             help="Where the agents of other hosts listen (naiad agent); for --launcher=agent and auto."),
        Flag(name="agent-token-file", kind=FILE, option="launchers.token_file", ours=True, default="none",
             help="A file with the token of these agents. Agents on other hosts need one."),
        Flag(name="agent-cert-file", kind=FILE, option="launchers.cert_file", ours=True, default="none",
             help="The certificate (PEM) that this server shows to agents; then connections with them are encrypted "
             "(TLS 1.3), and agents must show one as well. With --agent-key-file and --agent-root-cert-file."),
        Flag(name="agent-key-file", kind=FILE, option="launchers.key_file", ours=True, default="none",
             help="The private key (PEM) of --agent-cert-file, without passphrase."),
        Flag(name="agent-root-cert-file", kind=FILE, option="launchers.root_cert_file", ours=True, default="none",
             help="The certificate authority (PEM) that has signed the certificates of the agents."),
        Flag(name="ray-address", kind=TEXT, option="launchers.ray_address", ours=True, default="auto",
             help="The Ray cluster of --launcher=ray and auto: HOST:PORT of its head, or auto for the cluster that "
             "this machine is in. Needs the extra ray."),
        Flag(name="worker-lease-secs", kind=DURATION, option="launchers.lease_s", ours=True,
             help="How long an agent that Ray has placed waits for the server before it ends."),
        Flag(name="max-local-workers", kind=integer(0, 4096), option="launchers.max_local_workers", ours=True,
             help="How many workers of models --launcher=auto starts on this machine; 0 for as many as it has "
             "processors."),
    ),
)  # fmt: skip

GROUPS = (_MODELS, _SCHEDULING, _HTTP, _GRPC, _OPENAI, _GPUS, _METRICS, _LOG, _TRACES, _SERVER)

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
