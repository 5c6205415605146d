"""Health, metadata, configurations and paths over HTTP."""

from __future__ import annotations

from bench.oracle.steps import Case, get, post

MODELS = ("types", "sum", "rows", "told", "fail", "classes", "versions", "reshaped", "prompt", "tokens")

CASES = [
    Case("server", get("/v2", ignore=("version",)), get("/v2?query=1", ignore=("version",)), get("/v2/health/live")),
    Case("metadata of models", *(get(f"/v2/models/{name}") for name in MODELS)),
    Case("configurations of models", *(get(f"/v2/models/{name}/config") for name in MODELS)),
    Case(
        "versions",
        get("/v2/models/versions/versions/1"),
        get("/v2/models/versions/versions/2"),
        get("/v2/models/versions/versions/3"),
        get("/v2/models/versions/versions/01"),
        get("/v2/models/versions/versions/0"),
        get("/v2/models/versions/versions/99999999999999999999"),
        get("/v2/models/versions/versions/-1"),
        get("/v2/models/versions/versions/"),
        get("/v2/models/versions/versions/x/ready"),
        get("/v2/models/versions/versions/1/ready"),
        get("/v2/models/versions/versions/2/ready"),
        get("/v2/models/versions/versions/1/config"),
        get("/v2/models/versions/versions/2/config"),
        get("/v2/models/versions/versions/2/stats"),
        get("/v2/models/no_such/versions/1"),
        get("/v2/models/no_such/versions/1/config"),
    ),
    Case(
        "models that are not loaded",
        get("/v2/models/late_never"),
        get("/v2/models/late_never/ready"),
        get("/v2/models/late_never/config"),
        get("/v2/models/late_never/stats"),
        get("/v2/models/late_never/versions/1"),
        get("/v2/models/late_never/versions/1/ready"),
    ),
    Case(
        "paths that do not exist",
        *(
            get(path)
            for path in (
                "/",
                "/v1",
                "/v2/",
                "/v2/models",
                "/v2/models/",
                "/v2/models/sum/",
                "/v2/models/sum/x",
                "/v2/models/sum/versions",
                "/v2/health",
                "/v2/health/",
                "/v2/health/alive",
                "/v2/repository",
                "/v2/systemsharedmemory",
                "/v2/trace",
                "/v2/log",
                "/metrics",
                "//v2",
                "/V2",
                "/v2/models/sum?x=1",
                "/v2/models/sum/ready?x=1",
            )
        ),
    ),
    Case(
        "methods that a path does not have",
        post("/v2", {}),
        post("/v2/health/live", {}),
        post("/v2/models/sum", {}),
        post("/v2/models/sum/ready", {}),
        post("/v2/models/sum/config", {}),
        post("/v2/models/sum/stats", {}),
        post("/v2/models/stats", {}),
        get("/v2/models/sum/infer"),
        get("/v2/models/prompt/generate"),
        get("/v2/models/prompt/generate_stream"),
        get("/v2/repository/index"),
        get("/v2/repository/models/sum/load"),
        get("/v2/repository/models/sum/unload"),
        post("/v2/systemsharedmemory/status", {}),
        get("/v2/systemsharedmemory/unregister"),
        get("/v2/systemsharedmemory/region/r/register"),
        post("/v2/models/sum/infer", {}, method="PUT"),
        post("/v2/models/sum", None, method="DELETE"),
        post("/v2/health/live", None, method="PATCH"),
        post("/v2/trace/setting", None, method="PUT"),
        post("/v2/models/sum/versions/1/explode", {}),
        get("/v2/models/no_such/infer"),
        get("/v2/models/sum/versions/9/infer"),
    ),
    Case(
        "statistics of nobody",
        get("/v2/models/no_such/stats"),
        get("/v2/models/sum/versions/9/stats"),
        get(
            "/v2/models/tokens/versions/1/stats",
            ignore=("inference_stats", "batch_stats", "inference_count", "execution_count", "last_inference"),
        ),
    ),
]
