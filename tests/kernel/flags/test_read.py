"""The words of a command line become options.

Flags as Python keywords.
"""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec
import pytest

from kernel.errors import BadOption
from kernel.flags.read import DEFAULTS, FLAGS, read_flags, read_keywords
from kernel.options import ListenAddress, RepositoryOptions, ServerOptions, TlsOptions
from kernel.records.record_settings import RecordSettings
from kernel.settings import TraceValues

#: Every flag of tritonserver 2.51 (`tritonserver --help`), and in the last line flags of later versions.
TRITONSERVER = """
id exit-timeout-secs log-verbose log-info log-warning log-error log-format log-file model-store model-repository
exit-on-error disable-auto-complete-config strict-readiness model-control-mode repository-poll-secs load-model
model-config-name model-load-thread-count model-load-retry-count model-namespacing enable-peer-access allow-http
http-address http-port reuse-http-port http-header-forward-pattern http-thread-count http-restricted-api allow-grpc
grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-allocation-pool-size grpc-use-ssl
grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level
grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics
allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config trace-config
backend-directory backend-config repoagent-directory cache-config cache-directory rate-limit rate-limit-resource
pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability
buffer-manager-thread-count host-policy model-load-gpu-limit strict-model-config response-cache-byte-size trace-file
trace-level trace-rate trace-count trace-log-frequency
http-max-input-size grpc-infer-thread-count grpc-max-response-pool-size allow-client-shm
"""


def read(*words: str) -> ServerOptions:
    return read_flags(words, {})[0]


def notes(*words: str) -> list[str]:
    return read_flags(words, {})[1]


def problem(*words: str) -> str:
    with pytest.raises(BadOption) as caught:
        read(*words)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", TRITONSERVER.split())
def test_every_flag_of_tritonserver_is_known(name: str) -> None:
    assert name in FLAGS or any(flag.alias == name for flag in FLAGS.values())


def test_every_option_has_a_flag_and_every_flag_sets_an_option_or_has_a_note() -> None:
    flags = {flag.option for flag in FLAGS.values() if flag.option}
    # One flag sets all trace settings, one those of the recorder.
    # The metrics port and that of OpenAI's API cannot be shared, so they have no reuse flag. `dev` is debugging.
    without_flag = {
        *leaves(TraceValues, "trace."),
        *leaves(RecordSettings, "record."),
        "metrics_listener.reuse_port",
        "openai_listener.reuse_port",
        "debugging",
    }
    assert flags == set(leaves(ServerOptions)) - without_flag | {"trace"}
    assert all(flag.help for flag in FLAGS.values() if flag.option)
    assert all(flag.note for flag in FLAGS.values() if not flag.option)


def leaves(struct: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Return the paths of all options in a struct. An optional struct is an option, and so are its fields."""
    found = []
    for name, kind in typing.get_type_hints(struct).items():
        inner = [each for each in (kind, *typing.get_args(kind)) if isinstance(each, type)]
        structs = [each for each in inner if issubclass(each, msgspec.Struct)]
        if not structs or kind not in structs:
            found.append(prefix + name)
        for each in structs:
            found += leaves(each, f"{prefix}{name}.")
    return found


def test_without_flags_the_demo_models_are_served_with_the_defaults() -> None:
    options = read()
    assert options == DEFAULTS
    assert options.demo
    assert notes() == []


def test_a_value_follows_its_flag_or_an_equals_sign() -> None:
    assert read("--http-port", "1").http_listener.port == read("--http-port=1").http_listener.port == 1
    assert read("--id=a=b").server_id == "a=b"
    assert read("--id", "--x").server_id == "--x"
    assert read("--id=").server_id == ""


def test_the_last_of_several_values_counts_and_repeatable_flags_collect_all() -> None:
    assert read("--http-port=1", "--http-port=2").http_listener.port == 2
    folders = read("--model-repository=a", "--model-store", "b", "--model-repository=a").repository.paths
    assert folders == (Path("a"), Path("b"))
    assert read("--metrics-config=a=1", "--metrics-config=a=1").metrics.config == ("a=1", "a=1")


def test_words_that_are_no_flags_are_model_repositories() -> None:
    options = read("a", "--http-port", "1", "b", "--model-repository=c")
    assert options.repository.paths == (Path("a"), Path("b"), Path("c"))
    assert options.http_listener.port == 1


def test_an_unambiguous_prefix_of_a_name_is_accepted() -> None:
    assert read("--http-po=7").http_listener.port == 7
    assert read("--model-r=a").repository.paths == (Path("a"),)
    assert problem("--log-f=x") == "--log-f could be --log-format or --log-file"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-x"], "Unexpected argument: -x"),
        ([""], "Unexpected argument: "),
        (["--no-such-flag"], "there is no flag --no-such-flag (naiad run --help lists all)"),
        (["--"], "there is no flag -- (naiad run --help lists all)"),
        (["--http-prot=1"], "there is no flag --http-prot; did you mean --http-port? "
                            "(naiad run --help lists all)"),
        (["--http-port"], "--http-port needs a value: PORT"),
        (["--http-port=x"], "--http-port: 'x' is not a whole number"),
        (["--disable-auto-complete-config=true"], "--disable-auto-complete-config takes no value"),
        (["--backend-config=x"], "--backend-config option format is '<backend name>,<setting>=<value>'. Got x"),
        (["--log-format=iso8601"], "--log-format: 'iso8601' is not one of default, ISO8601, json"),
        (["--response-cache-byte-size=1", "--cache-config=local,size=1"],
         "Incompatible flags --response-cache-byte-size and --cache-config both provided. "
         "Please provide one or the other."),
        (["--grpc-use-ssl=true"], "--grpc-use-ssl needs a certificate and its key: give --grpc-server-cert and "
                                  "--grpc-server-key"),
        (["--http-use-ssl-mutual=1", "--http-server-cert=c", "--http-server-key=k"],
         "--http-use-ssl-mutual needs --http-root-cert, the certificate authority of the clients"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_command_line_is_one_line(words: list[str], message: str) -> None:
    assert problem(*words) == message


def test_the_address_of_metrics_defaults_to_that_of_http() -> None:
    assert read("--http-address=127.0.0.1").metrics_listener.address == "127.0.0.1"
    assert read("--http-address=127.0.0.1", "--metrics-address=::1").metrics_listener.address == "::1"


def test_either_flag_switches_auto_completion_off() -> None:
    assert read().repository.auto_complete_config
    assert not read("--disable-auto-complete-config").repository.auto_complete_config
    assert not read("--strict-model-config=true").repository.auto_complete_config
    assert read("--strict-model-config=false").repository.auto_complete_config
    assert not read("--disable-auto-complete-config", "--strict-model-config=false").repository.auto_complete_config


def test_the_flags_of_a_front_door_together_set_its_tls_options() -> None:
    files = ["--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]
    assert read(*files).grpc.tls is None
    assert read("--grpc-use-ssl=true", *files).grpc.tls == TlsOptions(Path("c"), Path("k"), Path("r"), False)
    assert read("--grpc-use-ssl-mutual=true", *files).grpc.tls == TlsOptions(Path("c"), Path("k"), Path("r"), True)
    assert read("--grpc-use-ssl-mutual=false", *files).grpc.tls is None
    assert notes("--grpc-server-cert=c") == ["--grpc-server-cert has no effect without --grpc-use-ssl=true"]
    assert notes("--grpc-use-ssl=true", *files) == []


def test_numbers_that_are_too_low_are_raised_as_in_tritonserver() -> None:
    assert read("--exit-timeout-secs=-1").exit_timeout_s == 0
    assert read("--model-load-thread-count=0").repository.load_thread_count == 1


def test_a_flag_without_effect_is_logged_once_with_the_reason() -> None:
    lines = notes("--http-thread-count=4", "--cache-directory=/a", "--cache-directory=/b")
    assert lines == [
        "--http-thread-count has no effect: one event loop serves all connections; there is no thread pool",
        "--cache-directory has no effect: caches and agents are Python packages; the server does not search folders "
        "for them",
    ]


def test_a_flag_without_effect_is_not_logged_with_its_silent_value() -> None:
    assert notes("--allow-sagemaker=false", "--enable-peer-access=true") == []
    assert len(notes("--allow-sagemaker=true", "--enable-peer-access=false")) == 2


def test_resources_without_the_rate_limiter_are_logged() -> None:
    line = "--rate-limit-resource has no effect without --rate-limit=execution_count"
    assert notes("--rate-limit-resource=R:1") == notes("--rate-limit-resource=R:1", "--rate-limit=off") == [line]
    assert notes("--rate-limit-resource=R:1", "--rate-limit=execution_count") == []


def test_deprecated_flags_work_and_name_their_replacement() -> None:
    words = ["--trace-rate=5", "--trace-level=max", "--trace-file=/t"]
    traces = read(*words).trace
    assert (traces.trace_rate, traces.trace_level, traces.trace_file) == (5, ("TIMESTAMPS",), "/t")
    assert all("--trace-config" in line for line in notes(*words))
    assert notes("--strict-model-config=false") == [
        "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
    ]


def test_a_poll_interval_without_poll_mode_is_logged() -> None:
    assert notes("--repository-poll-secs=3") == [
        "--repository-poll-secs has no effect without --model-control-mode=poll"
    ]
    assert notes("--repository-poll-secs=3", "--model-control-mode=poll") == []


def test_flags_set_the_options_of_the_repository() -> None:
    options = read(
        "--model-repository=m", "--model-control-mode=EXPLICIT", "--load-model=a", "--load-model=a",
        "--exit-on-error=off", "--model-config-name=fast", "--model-namespacing=true",
        "--model-load-thread-count=2", "--model-load-retry-count=1", "--backend-config=a,b=c",
        "--host-policy=p,cpu-cores=0-1", "--repository-poll-secs=3", "--model-load-timeout-secs=9",
    ).repository  # fmt: skip
    assert options == RepositoryOptions(
        paths=(Path("m"),), control_mode="explicit", poll_s=3, load_models=("a",), exit_on_error=False,
        config_name="fast", namespacing=True, load_thread_count=2, load_retry_count=1, load_timeout_s=9,
        backend_config=("a,b=c",), host_policy=("p,cpu-cores=0-1",),
    )  # fmt: skip


def test_every_front_door_is_closed_by_default() -> None:
    options, notes = read_keywords({}, {})
    assert notes == []
    doors = (options.http_listener, options.grpc_listener, options.metrics_listener)
    assert [(door.allow, door.address) for door in doors] == [(False, "127.0.0.1")] * 3


def test_a_port_opens_its_front_door() -> None:
    options, _ = read_keywords({"http_port": 0, "grpc": True, "metrics_port": 9}, {})
    assert options.http_listener == ListenAddress(True, "127.0.0.1", 0)
    assert options.grpc_listener == ListenAddress(True, "127.0.0.1", 8001)
    assert options.metrics_listener == ListenAddress(True, "127.0.0.1", 9)


def test_front_doors_can_be_closed_or_opened_to_other_machines() -> None:
    options, _ = read_keywords({"http_port": 0, "http": False, "allow_grpc": True, "grpc_address": "0.0.0.0"}, {})
    assert not options.http_listener.allow
    assert options.grpc_listener.address == "0.0.0.0"


def test_keywords_have_the_values_of_flags() -> None:
    options, notes = read_keywords(
        {
            "model_repository": [Path("a"), "b"],
            "strict_readiness": False,
            "disable_auto_complete_config": True,
            "exit_timeout_secs": 3,
            "id": None,
        },
        {},
    )
    assert options.repository.paths == (Path("a"), Path("b"))
    assert not options.strict_readiness
    assert not options.repository.auto_complete_config
    assert (options.exit_timeout_s, options.server_id) == (3, "triton")
    assert notes == []
    assert read_keywords({"disable_auto_complete_config": False}, {})[0].repository.auto_complete_config


def test_wrong_keywords_have_the_errors_of_the_command_line() -> None:
    with pytest.raises(BadOption, match="there is no flag --htp-port; did you mean --http-port"):
        read_keywords({"htp_port": 1}, {})
    with pytest.raises(BadOption, match="--http-port"):
        read_keywords({"http_port": "many"}, {})


def test_an_embedded_server_does_not_poll_by_default() -> None:
    assert read_keywords({}, {})[0].busy_poll_us == 0
    assert read_keywords({"busy_poll_us": 100}, {})[0].busy_poll_us == 100
