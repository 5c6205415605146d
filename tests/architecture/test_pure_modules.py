"""Decisions stand in modules of their own, which can be tested without a clock, a socket or an event loop."""

from __future__ import annotations

import pytest

from tests.architecture.source import imports, source_files

#: Decisions: no clock, no I/O, no asyncio.
PURE = (
    "backends/supervision/backoff.py",
    "backends/config_requirements.py",
    "backends/transport/framing.py",
    "kernel/serving/catalog.py",
    "kernel/config/autofill.py",
    "kernel/config/check.py",
    "kernel/config/spec.py",
    "kernel/command/flags/flag.py",
    "kernel/command/flags/ignored.py",
    "kernel/command/flags/keywords.py",
    "kernel/command/flags/known.py",
    "kernel/command/flags/read.py",
    "kernel/command/flags/traces.py",
    "kernel/observe/custom_metrics.py",
    "kernel/observe/histogram.py",
    "kernel/observe/metric_rules.py",
    "kernel/observe/metrics_config.py",
    "kernel/observe/quantiles.py",
    "kernel/observe/report.py",
    "kernel/observe/statistics.py",
    "kernel/repository/backend_config.py",
    "kernel/repository/layout.py",
    "kernel/repository/origin.py",
    "kernel/repository/placement.py",
    "kernel/repository/versions.py",
    "kernel/repository/warmup.py",
    "kernel/serving/prepared.py",
    "kernel/settings.py",
    "kernel/serving/validation.py",
    "kernel/serving/input_order.py",
    "protocols/grpc/admission.py",
    "protocols/forwarding.py",
    "protocols/grpc/messages/codec.py",
    "protocols/grpc/messages/prepared.py",
    "protocols/grpc/framing.py",
    "protocols/grpc/h2/answers.py",
    "protocols/grpc/h2/connection.py",
    "protocols/grpc/h2/flow.py",
    "protocols/grpc/h2/frame_rules.py",
    "protocols/grpc/h2/frames.py",
    "protocols/grpc/h2/headers.py",
    "protocols/grpc/h2/keepalive.py",
    "protocols/grpc/h2/limits.py",
    "protocols/grpc/h2/streams.py",
    "protocols/grpc/h2/whole.py",
    "protocols/grpc/rpcs/response_order.py",
    "protocols/grpc/messages/raw.py",
    "protocols/http/codec.py",
    "protocols/http/compression.py",
    "protocols/http/cors.py",
    "protocols/http/metrics/custom_families.py",
    "protocols/http/generate_codec.py",
    "protocols/http/json/tensor.py",
    "protocols/http/fast/response_template.py",
    "protocols/http/fast/prepared.py",
    "protocols/http/openapi/document.py",
    "protocols/http/openapi/model.py",
    "protocols/http/openapi/operation.py",
    "protocols/http/openapi/paths.py",
    "protocols/http/openapi/schemas.py",
    "protocols/restricted.py",
    "protocols/http/metrics/families.py",
    "protocols/http/metrics/text.py",
    "schedulers/direct.py",
    "schedulers/dynamic/batcher.py",
    "schedulers/dynamic/scheduler.py",
    "schedulers/queue.py",
    "schedulers/shapes.py",
    "shm/blocks.py",
    "shm/datatypes.py",
    "shm/strings.py",
)
IMPURE_MODULES = {
    "asyncio",
    "anyio",
    "logging",
    "os",
    "pathlib",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
}


@pytest.mark.parametrize("path", PURE)
def test_decisions_are_pure(path: str) -> None:
    [file] = [file for file in source_files() if file.path == path]
    imported = {found.module.partition(".")[0] for found in imports(file) if not found.for_types}
    assert imported & IMPURE_MODULES == set()
