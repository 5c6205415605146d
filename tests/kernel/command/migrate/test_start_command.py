"""The start command of a Triton, as people have it: in a shell, a script, a Compose file, a manifest."""

from __future__ import annotations

import pytest

from kernel.command.migrate.findings import CHANGE, NOTE
from kernel.command.migrate.start_command import command_findings, flags_in

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
