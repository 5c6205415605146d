"""The rules of the tree: imports point down, files and functions stay small, pure modules stay pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "shm": {"shm"},
    "kernel": {"kernel", "shm"},
    "schedulers": {"schedulers", "kernel"},
    "backends": {"backends", "kernel", "shm"},
    "protocols": {"protocols", "kernel", "shm"},
}
COMPOSITION_ROOT = ROOT / "kernel" / "app.py"
OURS = [
    path
    for top in ALLOWED
    for path in sorted((ROOT / top).rglob("*.py"))
    if "generated" not in path.parts and "demo" not in path.parts
]
FILES = [path for path in OURS if path != COMPOSITION_ROOT]

#: Packages that the kernel process must not load, and where each may be imported.
FOREIGN = {
    # kernel/embedding/arrays.py is for programs that embed the server: the command line's never imports it.
    "numpy": ("backends", "shm/arrays.py", "kernel/command/infer.py", "kernel/embedding/arrays.py"),
    "onnxruntime": ("backends/onnxruntime",),
    "aiohttp": ("protocols/http",),
    "grpclib": ("protocols",),
    "google": ("kernel/config", "protocols/grpc"),
    "h2": ("protocols/grpc",),
    "pickle": (),
}

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
    "kernel/serving/triton_input_order.py",
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

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
#: Tables, which are read from one page: all messages between kernel and workers.
TABLES = {"backends/transport/wire.py"}
MAX_TABLE_LINES = 600


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path, *, also_for_types: bool = True) -> set[str]:
    """Return the top-level names of every module that a file imports, and full names of `from` imports."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if not also_for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_down(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    assert {module for module in imported(path) if module in ALLOWED} <= ALLOWED[top]


@pytest.mark.parametrize("module", FOREIGN)
def test_foreign_packages_are_imported_only_where_they_belong(module: str) -> None:
    places = [name(path) for path in OURS if module in imported(path, also_for_types=False)]
    assert [place for place in places if not place.startswith(FOREIGN[module])] == []


@pytest.mark.parametrize("path", PURE)
def test_decisions_are_pure(path: str) -> None:
    assert imported(ROOT / path, also_for_types=False) & IMPURE_MODULES == set()


@pytest.mark.parametrize("path", OURS, ids=name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= (MAX_TABLE_LINES if name(path) in TABLES else MAX_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize("path", OURS, ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "no module docstring"


def test_no_shell_and_no_evaluation_of_text() -> None:
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "os.system", "os.popen", "pickle.loads"}, name(path)
                assert not any(k.arg == "shell" for k in node.keywords), name(path)
