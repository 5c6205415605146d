"""No text that a client reads names a folder of the server: models that fail in every way there is are asked for."""

from __future__ import annotations

import base64
import http.client
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.checkout import ROOT
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

grpcclient = pytest.importorskip("tritonclient.grpc")

TENSORS = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""
PYTHON = f'backend: "python"\n{TENSORS}'
LABELLED = PYTHON.removesuffix("}]\n") + 'label_filename: "%s" }]\n'
ONNX = f'backend: "onnxruntime"\n{TENSORS}'
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError(__file__)\n"
BAD_START = "    def initialize(self, args):\n        open(args['model_repository'] + '/none')\n"
ENVIRONMENT = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/x" } }'
WARMUP = (
    'model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [1] '
    'input_data_file: "none" } } }]'
)

#: Name → configuration and model.py; None for a file that is not there.
MODELS: dict[str, tuple[str | None, str | None]] = {
    "bad_text": ("max_batch_size: [", MODEL),
    "bad_field": (PYTHON + "nothing: 1", MODEL),
    "bad_value": (PYTHON + "max_batch_size: -1", MODEL),
    "no_config": (None, None),
    "no_model": (PYTHON, None),
    "no_onnx": (ONNX, None),
    "no_class": (PYTHON, "import os\n"),
    "bad_syntax": (PYTHON, "class x(:\n"),
    "bad_import": (PYTHON, "import json\njson.loads('{')\n"),
    "bad_start": (PYTHON, MODEL + BAD_START),
    "no_labels": (LABELLED % "none.txt", MODEL),
    "labels_outside": (LABELLED % "../x", MODEL),
    "no_warmup": (PYTHON + WARMUP, MODEL),
    "file_outside": (PYTHON + 'default_model_filename: "../../x.py"', MODEL),
    "onnx_outside": (ONNX + 'default_model_filename: "../../x.onnx"', None),
    "operators_outside": (ONNX + 'model_operations { op_library_filename: "../../../x.so" }', None),
    "no_environment": (PYTHON + ENVIRONMENT, MODEL),
    "batching": (PYTHON, MODEL),
    "fails": (PYTHON, MODEL),
}  # fmt: skip


def write_models(folder: Path) -> None:
    for name, (config, source) in MODELS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        if config is not None:
            (folder / name / "config.pbtxt").write_text(config)
        if source is not None:
            (version / "model.py").write_text(source)
    (folder / "batching" / "batchstrategy.so").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("here") / "of-the-server"
    write_models(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "--model-control-mode=explicit") as running:
        yield running


def posted(server: ServerProcess, path: str, body: Any) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def check(text: str, folder: Path) -> None:
    for hidden in (folder.parent, ROOT, sys.prefix, sys.base_prefix, "naiad-model-", "/tmp/", "site-packages"):
        assert str(hidden) not in text, text


def test_models_that_cannot_be_loaded_name_their_files_within_the_repository(
    server: ServerProcess, folder: Path
) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        loaded = []
        for name in MODELS:
            over_http = posted(server, f"/v2/repository/models/{name}/load", {})
            check(over_http, folder)
            if not over_http:
                loaded.append(name)
                continue
            assert json.loads(over_http)["error"]
            with pytest.raises(Exception) as caught:
                client.load_model(name)
            check(str(caught.value), folder)
        assert set(loaded) <= {"fails", "no_environment"}  # of which the latter is refused where environments work
        index = str(client.get_model_repository_index(as_json=True))
    check(index, folder)
    check(posted(server, "/v2/repository/index", {}), folder)
    for relative in ("bad_import/1/model.py", "no_labels/none.txt", "no_warmup/warmup/none", "bad_text/config.pbtxt"):
        assert relative in index, index
    server.wait_for_log(str(folder / "bad_import/1/model.py"))


@pytest.mark.parametrize(
    "path", ["x" * 300, "1/" + "x" * 300, "x" * 2000, "a/" * 40 + "x", "../x", "1/model.py/x", "a\0b", ""]
)
def test_a_load_request_with_a_wrong_path_fails_in_tritons_words(
    server: ServerProcess, folder: Path, path: str
) -> None:
    wanted = "failed to load 'brought', failed to poll from model repository"
    content = base64.b64encode(MODEL.encode()).decode()
    parameters = {"config": "{}", "file:1/model.py": content, f"file:{path}": content}
    assert json.loads(posted(server, "/v2/repository/models/brought/load", {"parameters": parameters})) == {
        "error": wanted
    }
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        files = {"file:1/model.py": MODEL.encode(), f"file:{path}": MODEL.encode()}
        with pytest.raises(Exception, match=wanted):
            client.load_model("brought", config="{}", files=files)
        assert client.is_server_live()


def test_errors_of_requests_name_the_models_files_within_the_repository(server: ServerProcess, folder: Path) -> None:
    brought = {"config": '{"backend": "python"}', "file:1/model.py": base64.b64encode(MODEL.encode()).decode()}
    assert posted(server, "/v2/repository/models/brought/load", {"parameters": brought}) == ""
    assert posted(server, "/v2/repository/models/fails/load", {}) == ""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}
    for name in ("fails", "brought"):
        texts = [
            posted(server, f"/v2/models/{name}/infer", {"inputs": [tensor] if name == "fails" else []}),
            posted(server, f"/v2/models/{name}/generate", {"IN": 1}),
            posted(server, f"/v2/models/{name}/generate_stream", {"IN": 1}),
        ]
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            given = grpcclient.InferInput("IN", [1], "INT32")
            inputs = [given] if name == "fails" else []
            if inputs:
                given.set_data_from_numpy(__import__("numpy").zeros(1, "int32"))
            with pytest.raises(Exception) as caught:
                client.infer(name, inputs)
            texts.append(str(caught.value))
        for text in texts:
            check(text, folder)
            assert "1/model.py" in text, text
    assert "fails/1/model.py(3): execute" in posted(server, "/v2/models/fails/infer", {"inputs": [tensor]})
