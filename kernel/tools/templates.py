"""The files of new models, with comments that explain them. Pure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from kernel.config.to_text import to_pbtxt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec

PYTHON_CONFIG = """\
# The configuration of the model. The folder's name is the model's name.
backend: "python"

# Requests may have up to 8 rows, and the server joins waiting requests to batches of up to 8 rows. Clients send shapes
# with the number of rows first. Without batching: max_batch_size: 0, and no dynamic_batching.
max_batch_size: 8
dynamic_batching {
  # How long a request may wait for others. 0, the default: only while the model is busy.
  # max_queue_delay_microseconds: 1000
}

input [
  {
    name: "INPUT"
    data_type: TYPE_FP32  # also TYPE_INT64, TYPE_BOOL, TYPE_STRING (bytes), ...
    dims: [ -1 ]          # without the rows; -1 is any size
  }
]
output [
  {
    name: "OUTPUT"
    data_type: TYPE_FP32
    dims: [ -1 ]
  }
]

# Values for `initialize`; all are strings.
parameters { key: "factor" value { string_value: "2" } }

# How many copies of the model run at the same time, each in a process of its own.
# instance_group [ { count: 2 kind: KIND_CPU } ]
"""

PYTHON_MODEL = '''\
"""The model: a server calls `initialize` once, `execute` for each batch, and `finalize` at the end."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Load what every request needs. An exception here is the reason why the model does not load."""
        config = json.loads(args["model_config"])
        self.factor = np.float32(config["parameters"]["factor"]["string_value"])
        # Files beside this one: pathlib.Path(pb_utils.get_model_dir(), "weights.npy")

    def execute(self, requests):
        """Return one response for each request, in the same order."""
        responses = []
        for request in requests:
            # An array over the request's memory, with the rows first. It may be changed in place.
            given = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if not np.isfinite(given).all():
                # An error of one request: the other requests of the batch are not affected.
                error = pb_utils.TritonError("INPUT has values that are not finite", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            # breakpoint() stops here under `naiad dev`.
            tensor = pb_utils.Tensor("OUTPUT", given * self.factor)
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses

    def finalize(self):
        """Free what `initialize` made, if that is needed."""
'''

PYTHON_TEST = '''\
"""Tests of the model, without a server: `python -m pytest {folder}`."""

from pathlib import Path

import numpy as np
import pytest

from naiad import ServingError
from naiad.testing import load_model


@pytest.fixture(scope="module")
def model():
    with load_model(Path(__file__).parent) as model:
        yield model


def test_values_are_multiplied(model):
    response = model.infer({{"INPUT": [[1, 2, 3]]}})
    assert response["OUTPUT"].tolist() == [[2, 4, 6]]


def test_a_parameter_sets_the_factor():
    with load_model(Path(__file__).parent, parameters={{"factor": "10"}}) as model:
        assert model.infer({{"INPUT": [[1]]}})["OUTPUT"].tolist() == [[10]]


def test_requests_of_a_batch_do_not_meet(model):
    first, second, third = model.infer_batch([{{"INPUT": [[1]]}}, {{"INPUT": [[np.nan]]}}, {{"INPUT": [[3], [4]]}}])
    assert first["OUTPUT"].tolist() == [[2]]
    assert second.message == "INPUT has values that are not finite"
    assert third["OUTPUT"].tolist() == [[6], [8]]


def test_a_wrong_request_is_refused(model):
    with pytest.raises(ServingError, match="data-type is 'INT64', but model '{name}' expects 'FP32'"):
        model.infer({{"INPUT": np.ones((1, 1), np.int64)}})
'''

FUNCTION_MODEL = '''\
"""A model that is one function: its arguments are the inputs, and what it returns is the output `output`.

Their names and datatypes follow from the annotations, so no configuration is needed. A ValueError is an error of the
client. The function gets one request at a time; a class TritonPythonModel gets batches.
"""

import numpy as np
from numpy.typing import NDArray


def scale(x: NDArray[np.float32], factor: float = 2.0) -> NDArray[np.float32]:
    if factor < 0:
        raise ValueError("factor is negative")
    return x * factor
'''

FUNCTION_TEST = '''\
"""Tests of the model, without a server: `python -m pytest {folder}`."""

from pathlib import Path

import numpy as np
import pytest

from naiad.testing import load_model


@pytest.fixture(scope="module")
def model():
    with load_model(Path(__file__).parent) as model:
        yield model


def test_the_numbers_are_scaled(model):
    assert model.infer({{"x": np.array([1, 2], np.float32)}})["output"].tolist() == [2, 4]
    assert model.infer({{"x": np.array([1, 2], np.float32), "factor": [3.0]}})["output"].tolist() == [3, 6]


def test_a_wrong_factor_is_an_error_of_the_client(model):
    with pytest.raises(Exception, match="factor is negative"):
        model.infer({{"x": np.array([1], np.float32), "factor": [-1.0]}})
'''

CHAT_TEST = '''\
"""Tests of the model, without a server: `python -m pytest {folder}`."""

import json
from pathlib import Path

import pytest

from naiad.testing import load_model


@pytest.fixture(scope="module")
def model():
    with load_model(Path(__file__).parent) as model:
        yield model


def ask(model, **fields):
    """Return the responses to a chat, as the server sends it to the model."""
    request = {{"model": "{name}", "messages": [{{"role": "user", "content": "hello"}}], **fields}}
    return list(model.stream({{"openai_request": [json.dumps(request)]}}))


def test_the_text_comes_in_pieces(model):
    responses = ask(model)
    assert b"".join(response["text_output"][0] for response in responses) == b"You said: hello That is all I know."
    assert responses[-1]["finish_reason"][0] == b"stop"


def test_the_text_ends_at_the_limit(model):
    responses = ask(model, max_tokens=2)
    assert len(responses) == 2
    assert responses[-1]["finish_reason"][0] == b"length"
'''

SERVER_TEST = '''\
"""Tests of the model in a server inside of this program: `python -m pytest {folder}`."""

from pathlib import Path

import numpy as np
import pytest

from naiad import EmbeddedServer

NAME = {name}


@pytest.fixture(scope="module")
def server():
    repository = Path(__file__).resolve().parents[1]
    with EmbeddedServer(repository, model_control_mode="explicit", load_model=NAME) as server:
        yield server


def test_the_model_responds(server):
    # Replace these by inputs whose outputs you know.
    outputs = server.infer(
        NAME,
        {{
{inputs}        }},
    )
    assert set(outputs) == {outputs}
'''

_ONNX_HEADER = """\
# The configuration of the model. The folder's name is the model's name. This was read from model.onnx; a server
# would read it again if this file were missing. What is here can be changed as far as it does not contradict the file.
#
# max_batch_size: the most rows of a batch; shapes begin with the rows. 0 if the file has no batch dimension.
# dynamic_batching: the server joins waiting requests to batches; max_queue_delay_microseconds lets them wait.
# instance_group: how many copies of the model run at the same time, each in a process of its own.
# dims: without the rows; -1 is any size.
"""

_ENSEMBLE_HEADER = """\
# An ensemble: the server gives the outputs of one model to the next one, without sending them to the client. It has no
# code, only an empty version folder.
#
# input, output: what clients send and get.
# step: the models. input_map: input of the model -> tensor of the ensemble; output_map: output of the model -> tensor.
# A step runs as soon as its tensors exist, so independent steps run at the same time.
"""


def python_files(name: str, folder: str) -> dict[str, str]:
    """Return path → text of the files of a Python model. `folder` is how the author names the model's folder."""
    return {
        "config.pbtxt": PYTHON_CONFIG,
        "1/model.py": PYTHON_MODEL,
        _test_file(name): PYTHON_TEST.format(name=name, folder=folder),
    }


def chat_files(name: str, folder: str, demo_file: Callable[[str], str]) -> dict[str, str]:
    """Return path → text of the files of a chat model. `demo_file` returns a file of the demo, which is copied."""
    copied = {path: demo_file(path) for path in ("config.pbtxt", "1/model.py")}
    return {**copied, _test_file(name): CHAT_TEST.format(name=name, folder=folder)}


def function_files(name: str, folder: str) -> dict[str, str]:
    """Return path → text of the files of a model that is a plain function."""
    return {"1/model.py": FUNCTION_MODEL, _test_file(name): FUNCTION_TEST.format(folder=folder)}


def onnx_files(config: ModelConfig, spec: ModelSpec, folder: str) -> dict[str, str]:
    """Return path → text of the files beside an ONNX file. `config` is as completed from the file."""
    return {
        "config.pbtxt": f"{_ONNX_HEADER}\n{to_pbtxt(config)}",
        _test_file(config.name): _server_test(spec, folder),
    }


def ensemble_files(config: ModelConfig, spec: ModelSpec, folder: str) -> dict[str, str]:
    """Return path → text of the files of an ensemble."""
    return {
        "config.pbtxt": f"{_ENSEMBLE_HEADER}\n{to_pbtxt(config)}",
        "1/.gitkeep": "",
        _test_file(config.name): _server_test(spec, folder),
    }


def _server_test(spec: ModelSpec, folder: str) -> str:
    rows = [1] if spec.max_batch_size > 0 else []
    lines = []
    for name, tensor in spec.inputs.items():
        shape = (*rows, *(max(dim, 1) for dim in tensor.dims))
        is_text = tensor.datatype == "BYTES"
        made = f'np.full({shape}, b"text", object)' if is_text else f"np.zeros({shape}, {_dtype(tensor.datatype)})"
        lines.append(f"            {json.dumps(name)}: {made},\n")
    outputs = "{" + ", ".join(map(json.dumps, spec.outputs)) + "}"
    return SERVER_TEST.format(name=json.dumps(spec.name), folder=folder, inputs="".join(lines), outputs=outputs)


def _dtype(datatype: str) -> str:
    """Return the NumPy type of a datatype, as an expression. BF16, which NumPy lacks, is given as float32."""
    kinds = {"FP": "float", "BF": "float", "INT": "int", "UINT": "uint", "BOOL": "bool_"}
    letters, bits = re.fullmatch(r"([A-Z]+)(\d*)", datatype).groups()  # type: ignore[union-attr]  # every name is so
    return f"np.{kinds[letters]}{'32' if datatype == 'BF16' else bits}"


def _test_file(name: str) -> str:
    letters = re.sub(r"\W", "_", name)
    return f"test_{letters}.py"
