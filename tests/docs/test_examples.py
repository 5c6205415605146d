"""The examples of documents, run as they are written."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from bench.server import ServerProcess, wait_for
from kernel.config.load import from_pbtxt
from kernel.embedding import EmbeddedServer
from tests.docs.documents import DOCUMENTS, ROOT, code_blocks, document, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How many Python examples a document has, and thus tests run: those below, of a backend, and of the recipes.
PYTHON_EXAMPLES = {
    "README.md": 1,
    "CONTRIBUTING.md": 1,
    "docs/agents.md": 1,
    "docs/authoring.md": 2,
    "docs/backends.md": 5,
    "docs/batching.md": 1,
    "docs/caches.md": 1,
    "docs/embedding.md": 1,
    "docs/follow-one-request.md": 1,
    "docs/metrics.md": 1,
    "docs/mlflow.md": 2,
    "docs/openai.md": 1,
    "docs/python-models.md": 3,
    "docs/schedulers.md": 2,
    "docs/sklearn.md": 1,
    "docs/trees.md": 1,
}


def run(text: str, source: str) -> str:
    """Run an example and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, source, "exec"), {})
    return printed.getvalue()


@pytest.fixture(scope="module")
def demo() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(http_port=0) as server:
        yield server


def test_every_python_example_is_run_by_a_test() -> None:
    found = {name_of(path): len(code_blocks(path.read_text(), "python")) for path in DOCUMENTS}
    assert {name: count for name, count in found.items() if count} == PYTHON_EXAMPLES


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_configuration_is_well_formed(path: Path) -> None:
    for block in code_blocks(path.read_text(), "pbtxt"):
        from_pbtxt(block.text.encode(), name_of(path))


def test_the_first_requests_of_the_readme_get_responses(demo: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = document("README.md")
    port = demo.ports["http"]
    [block] = code_blocks(text, "python")
    assert "localhost:8000" in block.text
    assert run(block.text.replace("localhost:8000", f"localhost:{port}"), "README.md") == "[0. 2. 4. 6.]\n"

    curl = re.search(r"curl -s localhost:8000(\S+) -d @(\S+)", text)
    assert curl is not None
    request = urllib.request.Request(f"{demo.http_url}{curl[1]}", (ROOT / curl[2]).read_bytes())
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["model_name"] == "digits"

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    commands = re.findall(r"^    naiad infer (.+)", text, re.MULTILINE)
    assert len(commands) == 2
    for command, expected in zip(commands, ("OUTPUT0", "number = 5"), strict=True):
        words = [sys.executable, "-m", "kernel", "infer", *shlex.split(command), f"--url=127.0.0.1:{port}"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stdout


def test_the_chat_of_the_openai_page_is_responded_to() -> None:
    with ServerProcess(None, "--demo=chat", "--openai-port=0") as server:
        [block] = code_blocks(document("docs/openai.md"), "python")
        printed = run(block.text.replace("localhost:9000", f"127.0.0.1:{server.openai_port}"), "docs/openai.md")
    assert printed == "You said: Hello That is all I know."


def test_the_log_settings_of_the_example_are_taken(demo: EmbeddedServer) -> None:
    text = document("docs/flags-and-logs.md")
    command = re.search(r"curl -s -X POST localhost:8000(\S+) -d '([^']+)'", text)
    assert command is not None
    with urllib.request.urlopen(urllib.request.Request(demo.http_url + command[1], command[2].encode())) as response:
        settings = json.load(response)
    assert settings.items() >= json.loads(command[2]).items()


def test_a_server_in_a_program_works_as_shown(folder: Path) -> None:
    [block] = code_blocks(document("docs/embedding.md"), "python")
    (folder / "program.py").write_text(block.text)
    ended = subprocess.run([sys.executable, "-W", "error", "program.py"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("[2. 3. 4. 5.]\n1\n2\n3\nhttp://127.0.0.1:")


def write_model(folder: Path, name: str, config: str, source: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)
    (folder / name / "1" / "model.py").write_text(source)


def test_the_python_model_works_as_shown(folder: Path) -> None:
    text = document("docs/python-models.md")
    config, *parameters = code_blocks(text, "pbtxt")
    source, plain, calling = code_blocks(text, "python")
    names = [f"double_{number}" for number in range(len(parameters) + 1)]
    # The modules of the example may not be installed.
    texts = [block.text.replace("torch,transformers", "decimal,fractions") for block in parameters]
    for name, parameter in zip(names, ["", *texts], strict=True):
        asynchronous = "naiad.concurrency" in parameter
        code = source.text.replace("def execute", "async def execute") if asynchronous else source.text
        write_model(folder, name, config.text + parameter, code)
    write_model(folder, "double", config.text, source.text)
    write_model(folder, "calling", config.text, calling.text)
    write_model(folder, "plain", "", plain.text)
    with EmbeddedServer(folder) as server:
        assert server.infer("plain", {"x": np.array([1, 2], np.float32)})["output"].tolist() == [2, 4]
        for name in [*names, "calling"]:
            outputs = server.infer(name, {"IN": np.array([1, 2, 3], np.float32)})
            assert outputs["OUT"].tolist() == [2, 4, 6], name


@pytest.mark.parametrize(
    ("page", "package", "trained", "served"),
    [
        ("docs/trees.md", "xgboost", "cancer.json", "xgboost.json"),
        ("docs/sklearn.md", "skops", "cancer.skops", "model.skops"),
        ("docs/mlflow.md", "mlflow", "cancer", ""),  # a folder; run by `make test-mlflow`
    ],
)
def test_a_trained_model_is_served_as_shown(folder: Path, page: str, package: str, trained: str, served: str) -> None:
    pytest.importorskip(package)
    block = code_blocks(document(page), "python")[0]
    # A process of its own: the library's threads stay out of this one.
    subprocess.run([sys.executable, "-c", block.text], cwd=folder, check=True)
    (folder / "models" / "cancer" / "1").mkdir(parents=True)
    (folder / trained).rename(folder / "models" / "cancer" / "1" / served)
    rows, classes = load_breast_cancer(return_X_y=True)
    with EmbeddedServer(folder / "models", http_port=0) as server:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/cancer") as response:
            [tensor] = json.load(response)["inputs"]
        datatype = {"FP32": np.float32, "FP64": np.float64}[tensor["datatype"]]
        outputs = server.infer("cancer", {tensor["name"]: rows[:20].astype(datatype)})
    [found] = [outputs[name] for name in ("predict", "output__0", "output-0") if name in outputs]
    assert found.ravel().tolist() == classes[:20].tolist()


def test_an_mlflow_folder_is_served_by_a_python_model_as_shown(folder: Path) -> None:
    pytest.importorskip("mlflow")  # run by `make test-mlflow`
    trained, model = code_blocks(document("docs/mlflow.md"), "python")
    subprocess.run([sys.executable, "-c", trained.text], cwd=folder, check=True)
    version = folder / "models" / "own" / "1"
    version.mkdir(parents=True)
    (folder / "cancer").rename(version / "folder")
    (version / "model.py").write_text(model.text)
    rows, classes = load_breast_cancer(return_X_y=True)
    with EmbeddedServer(folder / "models") as server:
        found = server.infer("own", {"rows": rows[:20]})["output"]
    assert found.tolist() == classes[:20, None].tolist()


def test_the_model_with_a_metric_counts_on_the_page(folder: Path) -> None:
    [source] = code_blocks(document("docs/metrics.md"), "python")
    config = """backend: "python"
        input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
        output [ { name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] } ]"""
    write_model(folder, "words", config, source.text)
    with EmbeddedServer(folder, metrics_port=0) as server:
        server.infer("words", {"TEXT": ["three words here"]})

        def is_counted() -> bool:
            with urllib.request.urlopen(server.metrics_url) as response:
                return 'words_seen{model="words"} 3' in response.read().decode()

        wait_for(is_counted)
