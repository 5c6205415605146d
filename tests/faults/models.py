"""The model repository of the faults: models whose responses say which request they belong to, and that misbehave."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from bench.models import PYTHON_MODELS, one_tensor, write_python_model

if TYPE_CHECKING:
    from pathlib import Path

_ONE_CPU = "instance_group [{ kind: KIND_CPU count: 1 }]\n"

#: Responds with its input, which is an id, and notes it before in the file `ledger`, if there is one. An id below zero
#: is an order: sleep for as many milliseconds, send the process a signal, hold the interpreter lock, or take memory.
OBEY = """
import json, os, re, signal, time
LEDGER = os.path.join(pb_utils.get_model_dir(), "ledger")

class TritonPythonModel:
    def initialize(self, args):
        self.ledger = open(LEDGER, "a", buffering=1) if os.path.exists(LEDGER) else None
        parameters = json.loads(args["model_config"])["parameters"]
        self.wait_s = float(parameters.get("wait_ms", {"string_value": "0"})["string_value"]) / 1000

    def execute(self, requests):
        if self.ledger is not None:
            numbers = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy().reshape(-1)[0] for r in requests]
            self.ledger.write("".join(f"{each}\\n" for each in numbers))
        responses = []
        for request in requests:
            [number] = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[:1]
            if number < 0:
                self.obey(request, int(-number))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[number]], np.int64))]))
        time.sleep(self.wait_s)
        return responses

    def obey(self, request, order):
        if order >= 3_000_000:
            self.taken = np.ones((order - 3_000_000) << 20, np.uint8)
        elif order >= 2_000_000:
            re.match(r"(a|a?)+$", "a" * 60 + "b")  # one call that takes ages and holds the interpreter lock
        elif order >= 1_000_000:
            os.kill(os.getpid(), order - 1_000_000)
        else:
            self.sleep(request, order)

    def sleep(self, request, order):
        end = time.monotonic() + order / 1000
        while time.monotonic() < end and not request.is_cancelled():
            time.sleep(0.005)
"""

#: A decoupled model: as many responses as its input says.
REPEAT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            [count] = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:1]
            for value in range(int(count)):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int64))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

#: Adds up the inputs of each sequence.
SUM = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number = request.correlation_id()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().reshape(-1)[0]
            end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy().reshape(-1)[0]
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0]
            if start or number not in self.sums:
                self.sums = {each: total for each, total in self.sums.items() if len(self.sums) < 1000}
                self.sums[number] = 0
            self.sums[number] += int(value)
            total = self.sums.pop(number) if end else self.sums[number]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[total]], np.int64))]))
        return responses
"""

#: Calls `obey` and returns its response.
CALL = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            called = pb_utils.InferenceRequest(model_name="obey", requested_output_names=["OUT"], inputs=[tensor])
            response = called.exec()
            if response.has_error():
                responses.append(pb_utils.InferenceResponse([], response.error()))
            else:
                output = pb_utils.get_output_tensor_by_name(response, "OUT")
                responses.append(pb_utils.InferenceResponse([output]))
        return responses
"""

SEQUENCES = """
max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 2000000
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] }
  ]
}
"""

PAIR = """
platform: "ensemble"
input [{ name: "INPUT0" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUTPUT0" data_type: TYPE_UINT8 dims: [-1] }]
ensemble_scheduling { step [
  {
    model_name: "echo" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "MIDDLE" }
  },
  {
    model_name: "echo" model_version: -1
    input_map { key: "INPUT0" value: "MIDDLE" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
  }
] }
"""


def one_number(*dims: str) -> str:
    """Return the input IN and the output OUT of models that take an id."""
    shape = f"[{', '.join(dims)}]"
    return one_tensor("input", "IN", "TYPE_INT64", shape) + one_tensor("output", "OUT", "TYPE_INT64", shape)


#: Orders to the model `obey`, as ids: `KILL - 11` sends its own process signal 11, `TAKE - 100` takes 100 MiB.
KILL, HOLD, TAKE = -1_000_000, -2_000_000, -3_000_000


def waits(milliseconds: float) -> str:
    """Return the part of a configuration that lets each execution of `obey` take some time."""
    return f'parameters {{ key: "wait_ms" value {{ string_value: "{milliseconds}" }} }}\n'


def write_obey(
    root: Path, *, name: str = "obey", instances: int = 2, config: str = "max_batch_size: 4\n", noted: bool = False
) -> Path:
    """Write the model that responds with its input. Returns the file in which it notes what it executes, if `noted`."""
    write_python_model(root / name, config + one_number("1"), OBEY, instances)
    ledger = root / name / "1" / "ledger"
    if noted:
        ledger.touch()
    return ledger


def executed(ledger: Path) -> Counter[int]:
    """Return how often each id was executed, or begun."""
    return Counter(map(int, ledger.read_text().split()))


def write_healthy(root: Path) -> None:
    """Write the model that `bench.heavy.healthy` uses."""
    write_python_model(root / "healthy", *PYTHON_MODELS["add_sub"])


def write_echo(root: Path, name: str = "echo") -> None:
    """Write a model of our identity backend: INPUT0 to OUTPUT0, bytes of any number."""
    (root / name / "1").mkdir(parents=True)
    tensors = one_tensor("input", "INPUT0", "TYPE_UINT8", "[-1]") + one_tensor(
        "output", "OUTPUT0", "TYPE_UINT8", "[-1]"
    )
    (root / name / "config.pbtxt").write_text(f'backend: "identity"\n{_ONE_CPU}{tensors}')


def write_repository(root: Path) -> None:
    """Write all models."""
    write_healthy(root)
    write_echo(root)
    write_obey(root)
    write_obey(root, name="reloaded", instances=1)
    decoupled = "model_transaction_policy { decoupled: true }\n"
    write_python_model(root / "repeat", decoupled + one_number("-1"), REPEAT)
    write_python_model(root / "sum", SEQUENCES + one_number("1"), SUM)
    write_python_model(root / "call", one_number("1", "1"), CALL)
    (root / "pair" / "1").mkdir(parents=True)
    (root / "pair" / "config.pbtxt").write_text(textwrap.dedent(PAIR))
