"""Trace and log settings over HTTP; every case leaves them as it found them."""

from __future__ import annotations

from typing import Any

from bench.oracle.steps import Case, Step, get, post

TRACE = "/v2/trace/setting"
SUM = "/v2/models/sum/trace/setting"
OPEN = {"case-key": "open"}


def trace(path: str = TRACE, **settings: Any) -> Step:
    return post(path, settings)


def log(**settings: Any) -> Step:
    return post("/v2/logging", settings, OPEN)


CASES = [
    Case(
        "trace settings",
        get(TRACE),
        trace(),
        trace(trace_rate="7"),
        get(SUM),
        trace(SUM, trace_rate="3"),
        trace(trace_rate="8"),
        get(SUM),
        trace(SUM, trace_rate=None),
        get(SUM),
        trace(trace_rate=None),
        get(TRACE),
    ),
    Case(
        "trace counts",
        trace(trace_count="5"),
        trace(trace_count="-1"),
        trace(trace_count="-5"),
        trace(trace_count="x"),
        trace(trace_count=5),
        trace(trace_count=None),
        trace(log_frequency="10"),
        trace(log_frequency="-1"),
        trace(log_frequency=None),
    ),
    Case(
        "trace rates",
        trace(trace_rate="0"),
        trace(trace_rate="-1"),
        trace(trace_rate="1.5"),
        trace(trace_rate=7),
        trace(trace_rate=""),
        trace(trace_rate="99999999999999999999"),
        trace(trace_rate=["1"]),
        trace(trace_rate=None),
    ),
    Case(
        "trace levels",
        trace(trace_level=["OFF"]),
        trace(trace_level=["NONSENSE"]),
        trace(trace_level="OFF"),
        trace(trace_level=[5]),
        trace(trace_level=["OFF", "TIMESTAMPS"]),
        trace(trace_level=None),
        get(TRACE),
    ),
    Case(
        "trace files",
        trace(trace_file="/tmp/case_trace"),
        trace(trace_file=None),
        trace(trace_mode="opentelemetry"),
        get(TRACE),
    ),
    Case(
        "trace settings that are none",
        trace(nonsense="1"),
        post(TRACE, []),
        post(TRACE, b"{"),
        post(TRACE, b""),
        post(TRACE, 5),
        trace("/v2/models/no_such/trace/setting", trace_rate="1"),
        get("/v2/models/no_such/trace/setting"),
        get("/v2/models/sum/versions/1/trace/setting"),
        get("/v2/models/late_never/trace/setting"),
    ),
    Case(
        "log settings",
        get("/v2/logging", headers=OPEN),
        log(),
        log(log_verbose_level=2),
        log(log_info=False),
        log(log_info=True, log_verbose_level=0),
        log(log_warning=False, log_error=False),
        log(log_warning=True, log_error=True),
        log(log_format="ISO8601"),
        log(log_format="default"),
        get("/v2/logging", headers=OPEN),
    ),
    Case(
        "log settings that are none",
        log(log_info="yes"),
        log(log_info=1),
        log(log_verbose_level=-1),
        log(log_verbose_level="1"),
        log(log_verbose_level=1.5),
        log(log_verbose_level=2**32),
        log(log_verbose_level=0),
        log(log_format="xml"),
        log(log_format=5),
        log(log_file="/tmp/case_log"),
        log(log_file=""),
        log(log_info=None),
        log(log_format=None),
        log(log_verbose_level=None),
        log(nonsense=1),
        post("/v2/logging", [], OPEN),
        post("/v2/logging", b"{", OPEN),
        post("/v2/logging", b"", OPEN),
        get("/v2/logging", headers=OPEN),
    ),
    Case(
        "a part of the API that needs a header",
        get("/v2/logging"),
        get("/v2/logging", headers={"case-key": "shut"}),
        get("/v2/logging", headers={"Case-Key": "open"}),
        post("/v2/logging", {}),
        post("/v2/logging", {}, method="DELETE"),
        get("/v2/logging", headers={"case-key": ""}),
    ),
]
