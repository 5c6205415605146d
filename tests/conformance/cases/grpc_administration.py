"""Everything but inference over gRPC. Every case leaves the server as it found it."""

from __future__ import annotations

from typing import Any

from bench.oracle.steps import Case, Document, Step, rpc

#: Models whose state tells which cases went before.
COMING_AND_GOING = (
    "late_broken",
    "late_chain",
    "late_completed",
    "late_configured",
    "late_counted",
    "late_doubled",
    "late_paced",
    "late_sequence",
)
CHECKED_NAME = "newer Tritons check names"
OPEN = {"triton-grpc-protocol-case-key": "open"}
MODELS = ("types", "sum", "rows", "classes", "versions", "reshaped", "prompt", "tokens")


def trace(model: str = "", **values: Any) -> Step:
    settings = {name: {"value": value} if value is not None else {} for name, value in values.items()}
    return rpc("TraceSetting", {"settings": settings, "model_name": model})


def log(**settings: Document) -> Step:
    return rpc("LogSettings", {"settings": settings}, metadata=OPEN)


def load(model: str, **parameters: Document) -> Step:
    return rpc("RepositoryModelLoad", {"model_name": model, "parameters": parameters})


def unload(model: str, **parameters: Document) -> Step:
    return rpc("RepositoryModelUnload", {"model_name": model, "parameters": parameters})


CASES = [
    Case("server", rpc("ServerLive"), rpc("ServerMetadata", ignore=("version",))),
    Case(
        "metadata",
        *(rpc("ModelMetadata", {"name": name}) for name in MODELS),
        rpc("ModelMetadata", {"name": "versions", "version": "2"}),
        rpc("ModelMetadata", {"name": "late_never"}),
        rpc("ModelMetadata", {"name": "versions", "version": "3"}),
        rpc("ModelMetadata", {}),
        rpc("ModelMetadata", {"name": "versions", "version": "0"}),
        rpc("ModelMetadata", {"name": "versions", "version": "-1"}),
    ),
    Case(
        "configurations",
        *(rpc("ModelConfig", {"name": name}) for name in MODELS),
        rpc("ModelConfig", {}),
        rpc("ModelConfig", {"name": "versions", "version": "2"}),
        rpc("ModelConfig", {"name": "late_never"}),
    ),
    Case(
        "readiness",
        rpc("ModelReady", {"name": "sum"}),
        rpc("ModelReady", {"name": "versions", "version": "1"}),
        rpc("ModelReady", {"name": "versions", "version": "2"}),
        rpc("ModelReady", {"name": "versions", "version": "x"}),
        rpc("ModelReady", {"name": "late_never"}),
        rpc("ModelReady", {}),
    ),
    Case(
        "statistics of nobody",
        rpc("ModelStatistics", {"name": "no_such"}),
        rpc("ModelStatistics", {"name": "sum", "version": "9"}),
        rpc("ModelStatistics", {"name": "sum", "version": "x"}),
    ),
    Case(
        "statistics of all",
        rpc(
            "ModelStatistics",
            ignore=(
                "inference_stats",
                "inference_count",
                "execution_count",
                "last_inference",
                "batch_stats",
                "response_stats",
                "memory_usage",
            ),
        ),
    ),
    Case(
        "a model comes and goes",
        load("late_counted"),
        rpc("ModelReady", {"name": "late_counted"}),
        rpc("ModelStatistics", {"name": "late_counted"}),
        unload("late_counted"),
        rpc("ModelReady", {"name": "late_counted"}),
        unload("late_counted"),
        unload("no_such"),
    ),
    Case(
        "models that cannot be loaded",
        load("no_such"),
        load("late_broken"),
        load("").differs(
            CHECKED_NAME,
            status="grpc INVALID_ARGUMENT",
            error="Model name cannot be empty. Please enter a valid name to deploy.",
        ),
        unload(""),
        load("..").differs(
            CHECKED_NAME, error="invalid model name '..', model name must not contain path traversal characters"
        ),
        rpc("RepositoryModelLoad", {"repository_name": "r", "model_name": "sum"}),
        rpc("RepositoryModelUnload", {"repository_name": "r", "model_name": "sum"}),
    ),
    Case(
        "parameters of load and unload",
        load("late_counted", nonsense={"string_param": "x"}),
        load("late_counted", config={"int64_param": "5"}),
        load("late_counted", config={"string_param": "{"}),
        load("late_counted", **{"file:1/model.py": {"string_param": "x"}}),
        load("late_counted", **{"file:1/model.py": {"bytes_param": "eA=="}}),
        unload("no_such", unload_dependents={"bool_param": True}),
        unload("no_such", unload_dependents={"int64_param": "1"}),
        unload("no_such", nonsense={"int64_param": "1"}),
        unload("late_counted"),
    ),
    Case(
        "index",
        rpc("RepositoryIndex", ignore=COMING_AND_GOING),
        rpc("RepositoryIndex", {"ready": True}, ignore=COMING_AND_GOING),
        rpc("RepositoryIndex", {"repository_name": "r"}),
    ),
    Case(
        "trace settings",
        rpc("TraceSetting"),
        trace(trace_rate=["7"]),
        trace("sum", trace_rate=["3"]),
        trace("sum"),
        trace("sum", trace_rate=None),
        trace(trace_rate=None),
        trace(trace_count=["5"]),
        trace(trace_count=None),
        trace("no_such"),
        trace("no_such", trace_rate=["1"]),
    ),
    Case(
        "trace settings that are none",
        trace(trace_rate=["1", "2"]),
        trace(trace_rate=["x"]),
        trace(trace_rate=["-1"]),
        trace(trace_rate=None),
        trace(trace_rate=["99999999999999999999"]),
        trace(trace_count=["-5"]),
        trace(trace_count=["x"]),
        trace(log_frequency=["x"]),
        trace(trace_level=["NONSENSE"]),
        trace(trace_level=["OFF", "OFF"]),
        trace(trace_level=None),
        trace(trace_file=["/tmp/case_trace"]),
        trace(nonsense=["1"]),
        trace(trace_mode=["opentelemetry"]),
        rpc("TraceSetting"),
    ),
    Case(
        "log settings",
        log(),
        log(log_verbose_level={"uint32_param": 1}),
        log(log_verbose_level={"uint32_param": 0}),
        log(log_info={"bool_param": False}),
        log(log_info={"bool_param": True}),
        log(log_format={"string_param": "ISO8601"}),
        log(log_format={"string_param": "default"}),
    ),
    Case(
        "log settings that are none",
        log(log_info={"uint32_param": 1}),
        log(log_verbose_level={"bool_param": True}),
        log(log_format={"bool_param": True}),
        log(log_format={"string_param": "xml"}).differs("newer Tritons have this code", status="grpc UNAVAILABLE"),
        log(log_file={"string_param": "/tmp/x"}),
        log(nonsense={"bool_param": True}),
        log(log_info={}),
        log(),
    ),
    Case(
        "a part of the API that needs metadata",
        rpc("LogSettings"),
        rpc("LogSettings", metadata={"triton-grpc-protocol-case-key": "shut"}),
        rpc("LogSettings", metadata={"case-key": "open"}),
    ),
]
