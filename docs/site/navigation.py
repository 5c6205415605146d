"""The order of the pages. A page that is missing here, or is here and does not exist, ends the build."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pages_of_table(page: str) -> list[str]:
    """Return the pages that the table of `page` lists, in its order: links to documents in its folder."""
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    folder = page.rpartition("/")[0]
    return [f"{folder}/{name}" for name in re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\)", text, re.MULTILINE)]


#: Page → the parts below it: a heading, and pages by their paths without suffix. A page may be in one part only.
NAVIGATION: dict[str, list[tuple[str, list[str]]]] = {
    "README": [
        ("Move in from Triton", ["docs/moving-from-triton", "docs/differences"]),
        (
            "Models",
            [
                "docs/authoring",
                "docs/python-models",
                "docs/onnx",
                "docs/pytorch",
                "docs/trees",
                "docs/sklearn",
                "docs/mlflow",
                "docs/tensorrt",
                "docs/vllm",
                "docs/ensembles",
                "docs/sequences",
            ],
        ),
        (
            "Serving",
            [
                "docs/http-and-grpc",
                "docs/openai",
                "docs/batching",
                "docs/caches",
                "docs/traffic",
                "docs/embedding",
            ],
        ),
        (
            "Operating",
            [
                "docs/deploy/README",
                "docs/flags-and-logs",
                "docs/clouds",
                "docs/autoscaling",
                "docs/remote-workers",
                "docs/memory-limits",
                "docs/dashboard",
                "docs/metrics",
                "docs/monitoring/README",
                "docs/traces",
                "docs/recorder",
                "docs/load-testing",
                "docs/performance",
                "docs/troubleshooting",
                "docs/poison-requests",
                "docs/scaling",
                "docs/reliability",
                "SECURITY",
            ],
        ),
        ("Plug-ins", ["docs/backends", "docs/schedulers", "docs/agents", "docs/reference/README"]),
        (
            "How it is made",
            [
                "docs/architecture",
                "docs/follow-one-request",
                "docs/glossary",
                "docs/decisions/README",
                "bench/README",
                "bench/gpu/README",
                "CONTRIBUTING",
                "CHANGELOG",
            ],
        ),
    ],
    "docs/reference/README": [("", pages_of_table("docs/reference/README"))],
    "docs/decisions/README": [("", pages_of_table("docs/decisions/README"))],
}
