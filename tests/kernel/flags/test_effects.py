"""Every flag with an effect changes something that can be observed in a running server.

One file, because it is one table: a row for each flag, and a test that no flag is missing.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pytest
import trustme

from kernel.flags.known import GROUPS
from tests.kernel.flags.flag_lab import Running, run_server, write_model
from tests.kernel.repository_lab import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.repository.execution_environment import EnvironmentSettings


class Effect(msgspec.Struct, frozen=True):
    """The effect of a flag: a server with the flag shows `expected`, a server without the flag does not.

    Words may contain the names of files, such as "{models}".
    """

    #: The flag, and other flags that it needs.
    words: str
    #: Observes the running server, in a thread. The result is None if the server does not start.
    look: Callable[[Running], object]
    expected: object
    #: Words for both servers.
    base: str = "--model-repository={models}"
    #: Observes the server, such as its log, after it has stopped; then its result counts instead of that of `look`.
    after: Callable[[Running], object] | None = None


MODELS = "--model-repository={models} "
BROKEN = "--model-repository={broken} "
TLS = "--{door}-server-cert={{first}} --{door}-server-key={{first_key}} "


# ---- observations ----------------------------------------------------------------------------


def started(running: Running) -> object:
    return True


def index(running: Running) -> object:
    return sorted((each["name"], each.get("state")) for each in running.call("/v2/repository/index", {}).json)


def setting(kind: str, name: str) -> Callable[[Running], object]:
    return lambda running: running.call(f"/v2/{kind}").json[name]


def page(running: Running) -> str:
    running.infer()
    return running.call("/metrics", door="metrics").text


def logged(text: str) -> Callable[[Running], object]:
    return lambda running: any(text in line for line in running.log)


def shares_port(door: str) -> Callable[[Running], object]:
    """Observe whether another socket can be bound to the port."""

    def look(running: Running) -> object:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                other.bind(("127.0.0.1", running.ports[door]))
            except OSError:
                return False
            return True

    return look


def encrypted(door: str, client: str = "plain") -> Callable[[Running], object]:
    """Observe the name in the server's certificate, or "refused" without TLS or if the server refuses the client."""

    def look(running: Running) -> object:
        context = ssl.create_default_context(cafile=str(FILES["authority"]))
        context.check_hostname = False
        if client != "plain":
            context.load_cert_chain(FILES[client])
        if door == "grpc":
            context.set_alpn_protocols(["h2"])
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
        hello = hello if door == "grpc" else b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", running.ports[door]), timeout=60) as sock,
            context.wrap_socket(sock) as wrapped,
        ):
            wrapped.sendall(hello)
            if wrapped.recv(1):
                names: Any = wrapped.getpeercert()
                return dict(names["subjectAltName"])["DNS"]
        return "refused"

    return look


def keepalive(name: str) -> Callable[[Running], object]:
    return lambda running: getattr(running.grpc._listener_options.keepalive, name)


#: The three flags of the certificate that agents are shown, which are given together.
_AGENT_TLS = (
    "--launcher=local,agent --agents=127.0.0.1:1 --agent-cert-file={client} --agent-key-file={client_key} "
    "--agent-root-cert-file={authority}"
)


def encrypts(running: Running) -> object:
    """Observe whether the connections of the launchers for other hosts are encrypted."""
    others = running.supervisors[0].options["launcher"].others
    return [each.encryption is not None for each in others.values()]


def environments(running: Running) -> EnvironmentSettings:
    found: EnvironmentSettings = running.supervisors[0].options["launcher"].local.environments.settings
    return found


# ---- the table -------------------------------------------------------------------------------

_MODEL_EFFECTS = {
    "model-repository": Effect(MODELS + "--model-repository={other}", index, [("m", "READY"), ("n", "READY")]),
    "model-control-mode": Effect(
        "--model-control-mode=explicit", lambda r: r.call("/v2/repository/models/m/load", {}).status, 200
    ),
    "repository-poll-secs": Effect(
        "--repository-poll-secs=7", lambda r: r.lifecycle.settings.poll_s, 7, MODELS + "--model-control-mode=poll"
    ),
    "load-model": Effect("--load-model=m", index, [("m", "READY")], MODELS + "--model-control-mode=explicit"),
    "exit-on-error": Effect("--exit-on-error=false", started, True, BROKEN),
    "strict-readiness": Effect(
        "--strict-readiness=false", lambda r: r.call("/v2/health/ready").status, 200, BROKEN + "--exit-on-error=false"
    ),
    "strict-model-config": Effect("--strict-model-config=true", lambda r: r.supervisors[0].completed, False),
    "disable-auto-complete-config": Effect(
        "--disable-auto-complete-config", lambda r: r.supervisors[0].completed, False
    ),
    "model-config-name": Effect(
        "--model-config-name=fast", lambda r: r.call("/v2/models/m/config").json["default_model_filename"], "fast"
    ),
    "model-namespacing": Effect(
        "--model-namespacing=true", index, [("m", "READY")] * 2, MODELS + "--model-repository={same}"
    ),
    "model-load-thread-count": Effect(
        "--model-load-thread-count=9", lambda r: r.lifecycle.settings.load_thread_count, 9
    ),
    "model-load-retry-count": Effect(
        "--model-load-retry-count=2", lambda r: len(r.supervisors), 3, BROKEN + "--exit-on-error=false"
    ),
    "model-load-timeout-secs": Effect(
        "--model-load-timeout-secs=9", lambda r: r.supervisors[0].options["load_timeout_s"], 9
    ),
    "model-unload-timeout-secs": Effect(
        "--model-unload-timeout-secs=9", lambda r: r.lifecycle.settings.unload_timeout_s, 9
    ),
    "repository-copies": Effect("--repository-copies=/x", lambda r: r.lifecycle.settings.copies, "/x"),
    "install-requirements": Effect(
        "--install-requirements=false", lambda r: r.lifecycle.settings.installs_requirements, False
    ),
    "environment-cache-directory": Effect(
        "--environment-cache-directory=/x", lambda r: environments(r).cache_folder, "/x"
    ),
    "environment-cache-byte-size": Effect(
        "--environment-cache-byte-size=9", lambda r: environments(r).cache_byte_size, 9
    ),
    "environment-timeout-secs": Effect("--environment-timeout-secs=9", lambda r: environments(r).timeout_s, 9),
    "backend-config": Effect(
        "--backend-config=identity,a=b", lambda r: r.supervisors[0].plan.backend_config.get("a"), "b"  # type: ignore[union-attr]
    ),
    "allow-pickle": Effect(
        "--allow-pickle=m", lambda r: r.supervisors[0].plan.backend_config.get("allow-pickle"), "m"  # type: ignore[union-attr]
    ),
    "backend-directory": Effect(
        "--backend-directory={models}",
        lambda r: "backend-directory" in r.supervisors[0].plan.backend_config, True  # type: ignore[union-attr]
    ),
    "host-policy": Effect(
        "--host-policy=mine,cpu-cores=0-1", lambda r: r.supervisors[0].plan.cpus, (0, 1)  # type: ignore[union-attr]
    ),
}  # fmt: skip

_DOORS = {"http": "HTTPService", "grpc": "GRPCInferenceService", "metrics": "Metrics Service"}
_OPENAI = MODELS + "--openai-port=0"

_LISTENER_EFFECTS = {
    **{f"allow-{door}": Effect(f"--allow-{door}=false", lambda r, door=door: door in r.ports, False)  # type: ignore[misc]
       for door in _DOORS},
    **{f"{door}-address": Effect(f"--{door}-address=127.0.0.2", started, True,
                                 after=logged(f"Started {title} at 127.0.0.2:"))
       for door, title in _DOORS.items()},
    # A port in use: no other process can take it before the server starts.
    **{f"{door}-port": Effect(f"--{door}-port={{taken}}", started, True,
                              after=lambda r: f"Socket '127.0.0.1:{FILES['taken']}' already in use" in r.errors)
       for door in _DOORS},
    **{f"reuse-{door}-port": Effect(f"--reuse-{door}-port=true", shares_port(door), True) for door in ("http", "grpc")},
    **{f"{door}-use-ssl": Effect(f"--{door}-use-ssl=true", encrypted(door), "first", MODELS + TLS.format(door=door))
       for door in ("http", "grpc")},
    **{f"{door}-server-cert": Effect(f"--{door}-server-cert={{second}} --{door}-server-key={{second_key}}",
                                     encrypted(door), "second", MODELS + f"--{door}-use-ssl=1 " + TLS.format(door=door))
       for door in ("http", "grpc")},
    **{f"{door}-server-key": Effect(f"--{door}-server-key={{second_key}}", encrypted(door), "second",
                                    MODELS + f"--{door}-use-ssl=1 {TLS.format(door=door)} "
                                    f"--{door}-server-cert={{second}}")
       for door in ("http", "grpc")},
    **{f"{door}-use-ssl-mutual": Effect(f"--{door}-use-ssl-mutual=1", encrypted(door), "refused",
                                        MODELS + f"--{door}-use-ssl=1 {TLS.format(door=door)} "
                                        f"--{door}-root-cert={{authority}}")
       for door in ("http", "grpc")},
    **{f"{door}-root-cert": Effect(f"--{door}-root-cert={{authority}}", encrypted(door, "client"), "first",
                                   MODELS + f"--{door}-use-ssl-mutual=1 {TLS.format(door=door)} "
                                   f"--{door}-root-cert={{stranger}}")
       for door in ("http", "grpc")},
}  # fmt: skip

_OPENAI_EFFECTS = {
    "allow-openai": Effect("--allow-openai=false", lambda r: "openai" in r.ports, False, _OPENAI),
    "openai-port": Effect("--openai-port=0", lambda r: "openai" in r.ports, True),
    "openai-address": Effect(
        "--openai-address=127.0.0.2", started, True, _OPENAI, after=logged("Started OpenAIService at 127.0.0.2:")
    ),
    "openai-default-max-tokens": Effect(
        "--openai-default-max-tokens=7", lambda r: r.openai.door.default_max_tokens, 7, _OPENAI
    ),
    "openai-api-keys": Effect(
        "--openai-api-keys={api_keys}", lambda r: r.call("/v1/models", door="openai").status, 401, _OPENAI
    ),
    "demo": Effect("--demo=chat --openai-port=0", index, [("chat", "READY")], ""),
}  # fmt: skip

CACHED = "--model-repository={cached} "
NOT_LOADED = CACHED + "--exit-on-error=false "


def hits(running: Running) -> object:
    """Observe whether the second of two equal requests has the response of the first."""
    for _ in range(2):
        running.infer()
    return running.call("/v2/models/m/stats").json["model_stats"][0]["inference_stats"]["cache_hit"]["count"]


_SCHEDULING_EFFECTS = {
    "cache-config": Effect("--cache-config=local,size=100000", hits, 1, CACHED),
    "response-cache-byte-size": Effect("--response-cache-byte-size=100000", hits, 1, CACHED),
    "rate-limit": Effect(
        "--rate-limit=execution_count", index, [("m", "UNAVAILABLE")], NOT_LOADED + "--rate-limit-resource=R:1"
    ),
    "rate-limit-resource": Effect(
        "--rate-limit-resource=R:1", index, [("m", "UNAVAILABLE")], NOT_LOADED + "--rate-limit=execution_count"
    ),
}

_HTTP_EFFECTS = {
    "http-max-input-size": Effect("--http-max-input-size=10", lambda r: r.infer().status, 400),
    "http-header-forward-pattern": Effect(
        "--http-header-forward-pattern=My-.*", lambda r: (r.infer({"My-Key": "v"}).status, r.parameters),
        (200, [{"My-Key": "v"}]),
    ),
    "http-restricted-api": Effect("--http-restricted-api=metadata:key=value", lambda r: r.call("/v2").status, 403),
    "http-cors-origin": Effect(
        "--http-cors-origin=https://a.example",
        lambda r: r.call("/v2", headers={"Origin": "https://a.example"}).headers.get("Access-Control-Allow-Origin"),
        "https://a.example",
    ),
    "http-allowed-hosts": Effect(
        "--http-allowed-hosts=a.example,*.b.example",
        lambda r: [r.call("/v2", headers={"Host": host}).status for host in ("a.example", "x.b.example", "c.example")],
        [200, 200, 403],
    ),
    "http-dashboard": Effect(
        "--http-dashboard=false",
        lambda r: [r.call(path).status for path in ("/dashboard", "/dashboard/events")],
        [404, 404],
        base="--model-repository={models} --http-restricted-api=statistics:a=b",
    ),
}  # fmt: skip

_MS = 1_000_000
_GRPC_EFFECTS = {
    "grpc-header-forward-pattern": Effect(
        "--grpc-header-forward-pattern=my-.*", lambda r: (r.infer_over_grpc(**{"my-key": "v"}), r.parameters),
        (grpc.StatusCode.OK, [{"my-key": "v"}]),
    ),
    "grpc-restricted-protocol": Effect(
        "--grpc-restricted-protocol=inference:key=value", lambda r: r.infer_over_grpc(), grpc.StatusCode.UNAVAILABLE
    ),
    "grpc-infer-response-compression-level": Effect(
        "--grpc-infer-response-compression-level=high", lambda r: r.grpc._compression is not None, True
    ),
    "grpc-max-response-pool-size": Effect(
        "--grpc-max-response-pool-size=7", lambda r: r.grpc._max_response_pool_size, 7
    ),
    "grpc-keepalive-time": Effect("--grpc-keepalive-time=7", keepalive("time_ns"), 7 * _MS),
    "grpc-keepalive-timeout": Effect("--grpc-keepalive-timeout=7", keepalive("timeout_ns"), 7 * _MS),
    "grpc-keepalive-permit-without-calls": Effect(
        "--grpc-keepalive-permit-without-calls=true", keepalive("permit_without_calls"), True
    ),
    "grpc-http2-max-pings-without-data": Effect(
        "--grpc-http2-max-pings-without-data=7", keepalive("max_pings_without_data"), 7
    ),
    "grpc-http2-min-recv-ping-interval-without-data": Effect(
        "--grpc-http2-min-recv-ping-interval-without-data=7", keepalive("min_recv_ping_interval_ns"), 7 * _MS
    ),
    "grpc-http2-max-ping-strikes": Effect("--grpc-http2-max-ping-strikes=7", keepalive("max_ping_strikes"), 7),
    "grpc-max-connection-age": Effect("--grpc-max-connection-age=70000", keepalive("max_age_ns"), 70000 * _MS),
    "grpc-max-connection-age-grace": Effect(
        "--grpc-max-connection-age-grace=7", keepalive("max_age_grace_ns"), 7 * _MS
    ),
}  # fmt: skip


def gpu_settings(running: Running) -> Any:
    return running.kernel.repository.settings.gpus.settings  # type: ignore[attr-defined]  # a `Lifecycle`


_METRICS_EFFECTS = {
    "allow-cpu-metrics": Effect("--allow-cpu-metrics=false", lambda r: "nv_cpu_utilization" in page(r), False),
    "allow-gpu-metrics": Effect("--allow-gpu-metrics=false", lambda r: r.metrics.shows_gpus, False),
    "metrics-interval-ms": Effect(
        "--metrics-interval-ms=7", lambda r: r.metrics.server_metrics._load._interval_ns, 7 * _MS
    ),
    "metrics-config": Effect(
        "--metrics-config=summary_latencies=true", lambda r: "nv_inference_request_summary_us" in page(r), True
    ),
}  # fmt: skip

_GPU_EFFECTS = {
    "min-supported-compute-capability": Effect(
        "--min-supported-compute-capability=7.5", lambda r: gpu_settings(r).least_capability, 7.5
    ),
    "gpu-kind": Effect("--gpu-kind=cpu", lambda r: gpu_settings(r).on_cpu, True),
    "gpu-instances": Effect("--gpu-instances=processes", lambda r: gpu_settings(r).threads, False),
    "model-load-gpu-limit": Effect("--model-load-gpu-limit=1:0.5", lambda r: gpu_settings(r).load_limits, {1: 0.5}),
    "cuda-memory-pool-byte-size": Effect(
        "--cuda-memory-pool-byte-size=1:77", lambda r: gpu_settings(r).pool_byte_sizes, {1: 77}
    ),
    "pinned-memory-pool-byte-size": Effect(
        "--pinned-memory-pool-byte-size=77", lambda r: r.supervisors[0].options["pinned_pool"].byte_size, 77
    ),
}  # fmt: skip

_LOG_EFFECTS = {
    "log-verbose": Effect("--log-verbose=3", setting("logging", "log_verbose_level"), 3),
    "log-info": Effect("--log-info=false", setting("logging", "log_info"), False),
    "log-warning": Effect("--log-warning=false", setting("logging", "log_warning"), False),
    "log-error": Effect("--log-error=false", setting("logging", "log_error"), False),
    "log-format": Effect("--log-format=ISO8601", setting("logging", "log_format"), "ISO8601"),
    "log-file": Effect(
        "--log-file={log}", started, True,
        after=lambda r: Path(FILES["log"]).exists() and "Started HTTP" in Path(FILES["log"]).read_text(),
    ),
    "log-access": Effect(
        "--log-access=true", lambda r: r.call("/v2"), True,
        after=lambda r: any(line.startswith("INFO access ") for line in r.log),
    ),
    "log-model-lines": Effect(
        "--log-model-lines=7", lambda r: r.supervisors[0].options["launcher"].local.output_limits.lines_per_s, 7
    ),
    "log-model-bytes": Effect(
        "--log-model-bytes=7", lambda r: r.supervisors[0].options["launcher"].local.output_limits.bytes_per_s, 7
    ),
}  # fmt: skip

_SERVER_EFFECTS = {
    "trace-config": Effect("--trace-config=rate=7", setting("trace/setting", "trace_rate"), "7"),
    "trace-file": Effect("--trace-file=/t", setting("trace/setting", "trace_file"), "/t"),
    "trace-level": Effect("--trace-level=max", setting("trace/setting", "trace_level"), ["TIMESTAMPS"]),
    "trace-rate": Effect("--trace-rate=7", setting("trace/setting", "trace_rate"), "7"),
    "trace-count": Effect("--trace-count=7", setting("trace/setting", "trace_count"), "7"),
    "trace-log-frequency": Effect("--trace-log-frequency=7", setting("trace/setting", "log_frequency"), "7"),
    "state-directory": Effect("--state-directory={state}", lambda r: FILES["state"].is_dir(), True),
    "record": Effect("--record={record}", lambda r: r.kernel.traces, True),
    "max-decompression-ratio": Effect(
        "--max-decompression-ratio=2",
        lambda r: "--max-decompression-ratio" in r.call(
            "/v2/models/m/infer", gzip.compress(random.Random(0).randbytes(20_000) * 60), {"Content-Encoding": "gzip"}
        ).text,
        True,
    ),
    "id": Effect("--id=mine", lambda r: r.call("/v2").json["name"], "mine"),
    "listen-while-loading": Effect(
        "--listen-while-loading=false", started, False, after=logged("not ready until the models are loaded")
    ),
    "exit-timeout-secs": Effect("--exit-timeout-secs=7", started, True, after=logged("in flight get 7 s")),
    "admin-access": Effect(
        "--admin-access=key --admin-key={key}", lambda r: r.call("/v2/logging", {}).status, 403
    ),
    "admin-key": Effect(
        "--admin-key=@{key}", lambda r: r.call("/v2/logging", {}, {"admin-key": "secret"}).status, 200,
        MODELS + "--admin-access=key --admin-key=other",
    ),
    "execution-timeout": Effect(
        "--execution-timeout=2.5", lambda r: r.supervisors[0].options["limits"].timeout_ns, 2_500_000_000
    ),
    "response-wait-timeout": Effect(
        "--response-wait-timeout=0.5", lambda r: r.supervisors[0].options["limits"].response_wait_ns, 500_000_000
    ),
    "execution-report-secs": Effect(
        "--execution-report-secs=0.5", lambda r: r.supervisors[0].options["limits"].report_ns, 500_000_000
    ),
    "allow-client-shm": Effect(
        "--allow-client-shm=false",
        lambda r: "--allow-client-shm" in r.call(
            "/v2/systemsharedmemory/region/r/register", {"key": "/no_such_key", "offset": 0, "byte_size": 4}).text,
        True,
    ),
    "shared-memory-owner": Effect("--shared-memory-owner=peer", lambda r: r.kernel.regions.owned, True),
    "shared-memory-regions-per-peer": Effect(
        "--shared-memory-regions-per-peer=7", lambda r: r.kernel.regions.per_peer_limit, 7
    ),
    "event-loop": Effect("--event-loop=asyncio", lambda r: type(r.loop).__module__, "asyncio.unix_events"),
    "busy-poll-us": Effect("--busy-poll-us=7", lambda r: r.supervisors[0].poller.polling.longest_ns, 7000),
    "front-door-processes": Effect(
        "--front-door-processes=2", lambda r: "naiad_front_door_restarts_total 0" in page(r).splitlines(), True
    ),
    "worker-shared-memory": Effect(
        "--worker-shared-memory=false", lambda r: r.supervisors[0].options["launcher"].local.shared_memory, False
    ),
    "launcher": Effect(
        "--launcher=local,agent --agents=127.0.0.1:1", lambda r: list(r.supervisors[0].options["launcher"].others),
        ["agent"],
    ),
    "agents": Effect(
        "--launcher=local,agent --agents=127.0.0.1:1",
        lambda r: [
            agent.address for each in r.supervisors[0].options["launcher"].others.values() for agent in each.agents
        ],
        [("127.0.0.1", 1)],
    ),
    "agent-token-file": Effect(
        "--launcher=local,agent --agents=127.0.0.1:1 --agent-token-file={token}",
        lambda r: [
            agent.token for each in r.supervisors[0].options["launcher"].others.values() for agent in each.agents
        ],
        [b"0123456789abcdef"],
    ),
    "agent-cert-file": Effect(_AGENT_TLS, encrypts, [True]),
    "agent-key-file": Effect(_AGENT_TLS, encrypts, [True]),
    "agent-root-cert-file": Effect(_AGENT_TLS, encrypts, [True]),
    "ray-address": Effect(
        "--launcher=auto --ray-address=127.0.0.1:1", lambda r: list(r.supervisors[0].options["launcher"].others),
        ["ray"],
    ),
    "worker-lease-secs": Effect(
        "--launcher=auto --ray-address=127.0.0.1:1 --worker-lease-secs=7.5",
        lambda r: [each.lease_s for each in r.supervisors[0].options["launcher"].others.values()], [7.5],
    ),
    "max-local-workers": Effect(
        "--launcher=auto --agents=127.0.0.1:1 --max-local-workers=7",
        lambda r: r.supervisors[0].options["launcher"].max_local_workers, 7,
    ),
    "worker-start": Effect(
        "--worker-start=fork", lambda r: type(r.supervisors[0].options["launcher"].local).__name__, "ForkingLauncher"
    ),
    "memory-byte-size": Effect(
        "--memory-byte-size=5000000", lambda r: r.supervisors[0].options["budget"].limit_byte_size, 5000000
    ),
    "arena-byte-size": Effect(
        "--arena-byte-size=33554432", lambda r: r.supervisors[0].options["arena_byte_size"], 2**25
    ),
}  # fmt: skip

EFFECTS = {
    **_MODEL_EFFECTS, **_SCHEDULING_EFFECTS,
    **_LISTENER_EFFECTS, **_OPENAI_EFFECTS, **_HTTP_EFFECTS, **_GRPC_EFFECTS, **_METRICS_EFFECTS, **_GPU_EFFECTS,
    **_LOG_EFFECTS, **_SERVER_EFFECTS,
}  # fmt: skip

#: Name in words → file or port. The fixture `files` fills it.
FILES: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, certificate_files: dict[str, Path]) -> Iterator[None]:
    write_model(tmp_path / "models", "m", CONFIG + 'instance_group [{ host_policy: "mine" }]')
    (tmp_path / "models/m/configs").mkdir()
    needs = 'instance_group [{ rate_limiter { resources [{ name: "R" count: 2 }] } }]'
    write_model(tmp_path / "cached", "m", f"{CONFIG} response_cache {{ enable: true }} {needs}")
    (tmp_path / "models/m/configs/fast.pbtxt").write_text(CONFIG + 'default_model_filename: "fast"')
    write_model(tmp_path / "other", "n")
    write_model(tmp_path / "same", "m")
    write_model(tmp_path / "broken", "b")
    (tmp_path / "broken/b/1/fail").write_text("no luck")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        token = tmp_path / "token"
        token.write_text("0123456789abcdef")
        token.chmod(0o600)
        FILES.update(certificate_files, taken=taken.getsockname()[1], log=tmp_path / "log", token=token)
        FILES.update(
            (name, tmp_path / name)
            for name in ("models", "other", "same", "broken", "key", "cached", "record", "state")
        )
        FILES["key"].write_text("secret\n")
        FILES["api_keys"] = tmp_path / "api_keys"
        FILES["api_keys"].write_text("ann sk-secret\n")
        yield
    FILES.clear()


@pytest.fixture(scope="module")
def certificate_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = trustme.CA(), trustme.CA()
    found = {}
    for name, who in (("authority", authority), ("stranger", stranger)):
        found[name] = folder / f"{name}.pem"
        who.cert_pem.write_to_path(found[name])
    for name in ("first", "second", "client"):
        certificate = authority.issue_cert(name)
        found[name], found[f"{name}_key"] = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.private_key_and_cert_chain_pem.write_to_path(found[name])
        certificate.private_key_pem.write_to_path(found[f"{name}_key"])
    return found


def observed(effect: Effect, words: str) -> object:
    running, found = run_server(words.format(**FILES).split(), effect.look)
    return found if effect.after is None else effect.after(running)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_flag_has_an_effect(name: str) -> None:
    effect = EFFECTS[name]
    assert f"--{name}" in effect.words
    assert observed(effect, effect.base) != effect.expected, "a server without the flag shows the same"
    assert observed(effect, f"{effect.base} {effect.words}") == effect.expected


def test_every_flag_is_in_the_table() -> None:
    assert {flag.name for group in GROUPS for flag in group.flags} == EFFECTS.keys()


def test_trace_settings_of_the_command_line_can_be_changed_by_clients() -> None:
    def look(running: Running) -> object:
        change = {"trace_level": ["OFF"], "trace_rate": "5"}
        assert running.call("/v2/trace/setting", change).json["trace_rate"] == "5"
        return running.call("/v2/models/m/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"}).json

    words = "--model-repository={models} --trace-config=triton,file=/t --trace-config=level=TENSORS"
    running, found = run_server(words.format(**FILES).split(), look)
    assert found == {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "7", "trace_count": "-1", "log_frequency": "0", "trace_file": "/t",
        "trace_mode": "triton",
    }  # fmt: skip
    assert not [line for line in running.log if "--trace-config" in line]


def test_the_start_says_once_who_may_administer_the_server() -> None:
    base = "--model-repository={models} --model-control-mode=explicit "

    def lines(words: str) -> list[str]:
        running, _ = run_server((base + words).format(**FILES).split(), started)
        return [line for line in running.log if "--admin-access" in line]

    [line] = lines("")
    assert line.startswith("INFO kernel.app clients on this machine may load and unload models")
    [line] = lines("--grpc-address=0.0.0.0")
    assert line.startswith("WARNING kernel.app every client in the network may load and unload models")
    assert "(gRPC at 0.0.0.0:" in line
    [line] = lines("--grpc-address=0.0.0.0 --admin-access=local")
    assert line.startswith("INFO kernel.app only clients on this machine may load and unload models")


def test_a_start_with_a_key_that_cannot_be_read_fails_and_names_the_flag() -> None:
    for flag in (
        "--admin-access=key --admin-key=",
        "--http-restricted-api=trace:k=",
        "--grpc-restricted-protocol=trace:k=",
    ):
        running, _ = run_server(
            f"--model-repository={{models}} {flag}@{{models}}/none".format(**FILES).split(), started
        )
        name = flag.split()[-1].partition("=")[0]
        assert running.errors.startswith(f"{name}: the file "), running.errors
