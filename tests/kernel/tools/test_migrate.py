"""`naiad check --migrate`: the report about models, the start command and dashboards.

The start command of a Triton, as people have it: in a shell, a script, a Compose file, a manifest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.tools.migrate import (
    CHANGE,
    FAMILIES,
    NOTE,
    check_migration,
    command_findings,
    dashboard_findings,
    family_of,
    flags_in,
    metrics_in,
)
from tests.docs.documents import ROOT, code_spans, document, table

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
"""

RULES = """
groups:
  - name: triton
    rules:
      - alert: Slow
        expr: rate(nv_inference_request_duration_us[5m]) / rate(nv_inference_request_success[5m]) > 1e6
      - alert: Errors
        expr: rate(nv_inference_request_failure[5m]) > 0
      - alert: Old
        expr: nv_inference_pending_requests > 5
      - alert: Any
        expr: count({__name__=~"nv_inference_.*"}) == 0
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in {
        "good": IDENTITY,
        "vision": IDENTITY.replace("identity", "openvino"),
        "library": IDENTITY,
    }.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    (tmp_path / "models" / "library" / "libtriton_own.so").write_bytes(b"")
    return tmp_path / "models"


def test_the_families_are_those_of_the_page_about_metrics() -> None:
    named = {code_spans(row[0])[0] for row in table(document("docs/metrics.md")) if code_spans(row[0])}
    assert {name for name in named if name.startswith("nv_")} == FAMILIES


def test_our_own_dashboard_and_rules_need_no_change() -> None:
    for name in ("grafana-dashboard.json", "alerts.yaml"):
        findings, count = dashboard_findings(name, (ROOT / "docs" / "monitoring" / name).read_text())
        assert [each for each in findings if each.kind == CHANGE] == []
    assert count > 0


def test_metrics_are_found_with_their_families() -> None:
    assert metrics_in(RULES) == [
        "nv_inference_request_duration_us", "nv_inference_request_success", "nv_inference_request_failure",
        "nv_inference_pending_requests",
    ]  # fmt: skip
    assert family_of("nv_inference_first_response_histogram_ms_bucket") == "nv_inference_first_response_histogram_ms"


def test_a_metric_that_is_not_there_needs_a_change_and_gets_the_nearest_one() -> None:
    findings, count = dashboard_findings("rules.yaml", RULES + "\n# vllm:num_requests_running")
    [change] = [each for each in findings if each.kind == CHANGE]
    assert change.subject == "rules.yaml: nv_inference_pending_requests"
    assert "nearest one is nv_inference_pending_request_count" in change.text
    assert count == 4
    assert {each.subject for each in findings if each.kind == NOTE} == {
        "rules.yaml: nv_inference_request_failure", "rules.yaml: vllm:num_requests_running",
    }  # fmt: skip


def test_the_report_names_every_part_and_fails(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dashboards").mkdir()
    (tmp_path / "dashboards" / "rules.yaml").write_text(RULES)
    (tmp_path / "start.sh").write_text("tritonserver --model-repository=/models --http-thread-count=4")
    code = check_migration(
        repository, str(tmp_path / "start.sh"), [tmp_path / "dashboards"], as_json=False, verbose=False
    )
    text = capsys.readouterr().out
    assert code == 1
    assert "Models: 2 of 3 need a change" in text
    assert "CHANGE  vision: " in text
    assert "CHANGE  library: libtriton_own.so is a backend in C++" in text
    assert "Start command: all 2 stay as they are" in text
    assert "note    --http-thread-count: has no effect" in text
    assert "Metrics in dashboards and rules: 1 of 4 need a change" in text
    assert text.splitlines()[-1].startswith("3 changes are needed")


def test_a_repository_that_needs_no_change_succeeds(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = check_migration(repository / "good", "", [], as_json=True, verbose=False)
    [section] = json.loads(capsys.readouterr().out)
    assert (code, section["count"], section["findings"]) == (0, 1, [])
    assert check_migration(repository / "good", "", [], as_json=False, verbose=False) == 0
    assert "Also look at the start command" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="cannot read 'none.sh'"):
        check_migration(repository, "none.sh", [], as_json=False, verbose=False)
    with pytest.raises(BadOption, match="cannot read '.*none.json'"):
        check_migration(repository, "", [tmp_path / "none.json"], as_json=False, verbose=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadOption):
        check_migration(tmp_path / "empty", "", [], as_json=False, verbose=False)


EXPECTED = ["--model-repository=/models", "--http-port=9000", "--log-verbose=1"]

SHELL = "tritonserver --model-repository=/models --http-port 9000 --log-verbose=1 > log 2>&1"

DOCKER = """
docker run --gpus=all --rm --shm-size=1g -v /m:/models nvcr.io/nvidia/tritonserver:24.10-py3 \\
  /opt/tritonserver/bin/tritonserver --model-repository=/models \\
  --http-port 9000 --log-verbose=1
"""

RUN = "tritonserver --model-repository=/models --http-port 9000 --log-verbose=1"

SCRIPT = f"#!/bin/sh\n# tritonserver --wrong\nexec {RUN}; exit"

MANIFEST = """
containers:
  - image: nvcr.io/nvidia/tritonserver:24.10-py3
    args: ["tritonserver", "--model-repository=/models", "--http-port", "9000",
           "--log-verbose=1"]
    ports:
      - containerPort: 9000
"""

LIST = """
    command:
      - tritonserver
      - --model-repository=/models
      - "--http-port=9000"
      - '--log-verbose=1'
    resources: {limits: {cpu: 1}}
"""

IN_QUOTES = f'command: ["/bin/sh", "-c", "sleep 1; {RUN}"]'

COMPACT = '{"args":["tritonserver","--model-repository=/models","--http-port","9000","--log-verbose=1"]}'

TWO_LISTS = MANIFEST.replace('args: ["tritonserver", ', 'command: ["tritonserver"]\n    args: [')

TWO_BLOCKS = LIST.replace("- tritonserver\n", "- tritonserver\n    args:\n")

ONLY_ARGUMENTS = LIST.replace("command:\n      - tritonserver\n", "args:\n")


@pytest.mark.parametrize(
    "text", [SHELL, DOCKER, SCRIPT, MANIFEST, LIST, IN_QUOTES, COMPACT, TWO_LISTS, TWO_BLOCKS, ONLY_ARGUMENTS]
)
def test_flags_are_found_wherever_the_command_is(text: str) -> None:
    assert flags_in(text) == EXPECTED


def test_arguments_alone_may_begin_with_any_flag() -> None:
    assert flags_in("args:\n  - --http-port=9000\n  - --model-repository=/models\nports: [1]") == [
        "--http-port=9000", "--model-repository=/models",
    ]  # fmt: skip


def test_a_text_without_a_command_says_so() -> None:
    [finding] = command_findings("echo hello")[0]
    assert (finding.kind, finding.text) == (CHANGE, "there is no tritonserver with flags in it")


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        ("--http-threads=3", CHANGE, "there is no flag --http-threads"),
        ("--http-port=x", CHANGE, "--http-port"),
        ("--http-thread-count=8", NOTE, "has no effect: one event loop serves all connections"),
        ("--backend-directory=/b", NOTE, "backends in C++"),
        ("--backend-config=tensorflow,version=2", NOTE, "there is no backend 'tensorflow'"),
        ("--model-repository=s3://bucket/models", NOTE, "pip install '.[s3]'"),
        ("--response-cache-byte-size=1000 --cache-config=local,size=10", CHANGE, "Incompatible flags"),
    ],
)
def test_flags_that_need_attention_are_named(flags: str, kind: str, words: str) -> None:
    findings, _ = command_findings(f"tritonserver --model-repository=/m {flags}")
    assert any(each.kind == kind and words in each.text for each in findings), findings


def test_flags_of_triton_that_work_are_not_named() -> None:
    command = (
        "tritonserver --model-repository=/models --model-control-mode=explicit --load-model=a --load-model=b "
        "--strict-readiness=true --grpc-port=8001 --exit-timeout-secs=30 --pinned-memory-pool-byte-size=0 "
        "--grpc-use-ssl=true --grpc-server-cert=/c.pem --grpc-server-key=/k.pem"
    )
    assert [each for each in command_findings(command)[0] if each.kind == CHANGE] == []


def test_the_image_and_the_environment_are_looked_at() -> None:
    findings, _ = command_findings(DOCKER.replace("docker run", "LD_PRELOAD=/ops.so docker run"))
    subjects = {each.subject for each in findings}
    assert subjects >= {"nvcr.io/nvidia/tritonserver:24.10-py3", "LD_PRELOAD", "--shm-size"}
