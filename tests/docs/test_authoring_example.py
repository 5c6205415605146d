"""The examples of docs/authoring.md, run with models as `init` writes them."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from kernel.tools.templates import python_files
from tests.docs.documents import code_blocks, document

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CALLER_CONFIG = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number = float(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0])
            call = pb_utils.InferenceRequest(
                model_name="double",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", np.array([number], np.float32))],
            )
            responses.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
        return responses
"""


def test_the_examples_print_what_the_models_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"double/{name}": text for name, text in python_files("double", "models/double").items()}
    files |= {"caller/config.pbtxt": CALLER_CONFIG, "caller/1/model.py": CALLER}
    for name, text in files.items():
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    printed = []
    for block in code_blocks(document("docs/authoring.md"), "python"):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile(block.text, "docs/authoring.md", "exec"), {})
        printed.append(shown.getvalue())
    assert printed == [
        "[[3. 6.]]\n"
        "[[3.]] INPUT has values that are not finite\n"
        "[request id: <id_unknown>] inference input 'INPUT' data-type is 'INT64', but model 'double' expects 'FP32'\n",
        "[42.]\n",
    ]
