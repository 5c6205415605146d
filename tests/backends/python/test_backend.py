"""`is_ready` of a model."""

from __future__ import annotations

import json
import queue
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from backends.python.backend import PythonBackend
from backends.transport import wire
from kernel.errors import InternalError, InvalidArgument, NotFound, Unsupported
from tests.backends.worker.threaded_worker import Bench, request

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.python.conftest import Lab

FAILED = "Failed to process the request(s) for model 'lab_0_0', message: "


def failure(lab: Lab, source: str, *, decoupled: bool = False) -> str:
    """Load a model, execute one request, and return the text of the error that `execute` raised."""
    lab.load(source, decoupled=decoupled)
    with pytest.raises(InternalError) as caught:
        lab.execute(lab.request())
    return caught.value.message


# ---- loading --------------------------------------------------------------------------------


def test_initialize_gets_triton_s_arguments_as_strings(lab: Lab) -> None:
    lab.load(
        """
        def initialize(self, args):
            self.args = args

        def execute(self, requests):
            return [text(json.dumps(self.args))]
        """,
        max_batch_size=0,
    )
    args = json.loads(lab.text())
    assert json.loads(args.pop("model_config")) == {
        "name": "lab",
        "output": [{"name": "OUT"}],
        "max_batch_size": 0,
    }
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "lab_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(lab.dir),
        "model_version": "1",
        "model_name": "lab",
    }


def test_a_model_can_import_files_of_the_version_and_the_model_folder(lab: Lab) -> None:
    lab.write("SAID = 'beside'", "1/lab_beside.py", imports=False)
    lab.write("SAID = 'above'", "lab_above.py", imports=False)
    lab.load("""
        from lab_beside import SAID
        import lab_above
        from .lab_beside import SAID as again

        class TritonPythonModel:
            def execute(self, requests):
                return [text((SAID, lab_above.SAID, again, __name__, pb_utils.get_model_dir()))]
    """)
    assert lab.text() == str(("beside", "above", "beside", "1.model", str(lab.dir / "1")))


def test_the_model_file_may_have_another_name(lab: Lab) -> None:
    lab.write(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [text(__file__)]",
        "1/other.py",
    )
    lab.backend.load(lab.arguments(default_model_filename="other.py"))
    assert lab.text() == str(lab.dir / "1" / "other.py")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('no good')", "ValueError: no good\n\nAt:\n  {path}(1): <module>\n"),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n  {path}(1)",
        ),
        ("def broken(:", "SyntaxError: invalid syntax (model.py, line 1)"),
        ("", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no good')",
            "ValueError: no good\n\nAt:\n  {path}(3): initialize\n",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_has_a_reason(lab: Lab, source: str, reason: str) -> None:
    path = lab.write(source, imports=False)
    with pytest.raises(InternalError) as caught:
        lab.backend.load(lab.arguments())
    assert caught.value.message.startswith(reason.format(path=path))


def test_a_missing_model_file_fails_the_load(lab: Lab) -> None:
    with pytest.raises(InternalError, match=r"Python model file not found in '.*/lab/1/model.py'"):
        lab.backend.load(lab.arguments())


def test_a_model_file_must_end_with_py(lab: Lab) -> None:
    with pytest.raises(InternalError) as caught:
        lab.backend.load(lab.arguments(default_model_filename="other.txt"))
    assert caught.value.message == "Model name must end with '.py'. Model name is \"other.txt\"."


@pytest.mark.parametrize("key", ["FORCE_CPU_ONLY_INPUT_TENSORS", "writable_inputs"])
def test_a_parameter_that_is_neither_yes_nor_no_is_refused(lab: Lab, key: str) -> None:
    with pytest.raises(Unsupported) as caught:
        lab.load("def execute(self, requests): pass", parameters={key: {"string_value": "maybe"}})
    assert caught.value.message == f"Incorrect value for {key}: maybe'"


def test_finalize_is_called_and_its_errors_are_logged(lab: Lab) -> None:
    lab.load("""
        def finalize(self):
            pb_utils.Logger.log_info("finalizing")
            raise ValueError("no end")
    """)
    lab.backend.finalize()
    assert lab.logged[0] == ("INFO", "finalizing")
    assert lab.logged[1][0] == "ERROR"
    assert lab.logged[1][1].startswith("finalize of model 'lab_0_0' failed: ValueError: no end\n\nAt:\n")


# ---- auto-completed configuration -----------------------------------------------------------


def test_a_model_completes_its_configuration_and_then_loads(lab: Lab) -> None:
    lab.write("""
        imported = []

        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                imported.append(1)
                config.set_max_batch_size(4)
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
                config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
                config.set_dynamic_batching()
                return config

            def execute(self, requests):
                assert imported == [1]
                twice = pb_utils.Tensor("OUT", tensor(requests[0], "IN") * 2)
                return [pb_utils.InferenceResponse([twice])]
    """)
    arguments = lab.arguments(output=[])
    completed = lab.backend.complete(arguments)
    assert completed == {
        "name": "lab",
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
        "dynamic_batching": {},
    }
    assert "input" not in arguments.config
    lab.backend.load(lab.arguments(**completed))
    assert lab.run({"IN": np.ones((1, 2), np.float32)}).outputs["OUT"].tolist() == [[2.0, 2.0]]


def test_without_auto_complete_the_configuration_is_unchanged(lab: Lab) -> None:
    lab.write("class TritonPythonModel: pass")
    assert lab.backend.complete(lab.arguments()) == {"name": "lab", "output": [{"name": "OUT"}]}


def test_auto_complete_must_return_a_configuration(lab: Lab) -> None:
    lab.write("class TritonPythonModel:\n    auto_complete_config = staticmethod(lambda config: None)")
    with pytest.raises(InternalError) as caught:
        lab.backend.complete(lab.arguments())
    assert caught.value.message == (
        "auto_complete_config function in model 'lab' must return a valid pb.ModelConfig object."
    )


def test_the_error_of_auto_complete_shows_the_line(lab: Lab) -> None:
    path = lab.write(
        "class TritonPythonModel:\n"
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        config.set_max_batch_size(4)\n",
        imports=False,
    )
    with pytest.raises(InternalError) as caught:
        lab.backend.complete(lab.arguments(max_batch_size=8))
    assert caught.value.message == (
        "ValueError: configuration specified max_batch_size 8, but in auto-complete-config function "
        f"for model 'lab' specified max_batch_size 4\n\nAt:\n  {path}(4): auto_complete_config\n"
    )


# ---- failing --------------------------------------------------------------------------------


def test_a_model_that_raises_fails_its_batch_with_the_innermost_frame_first(lab: Lab) -> None:
    message = failure(
        lab,
        """
        def execute(self, requests):
            self.deeper()

        def deeper(self):
            raise RuntimeError("the model raised")
        """,
    )
    path = lab.dir / "1" / "model.py"
    lines = [line.strip() for line in path.read_text().splitlines()]
    inner, outer = lines.index('raise RuntimeError("the model raised")') + 1, lines.index("self.deeper()") + 1
    assert message == (
        f"{FAILED}RuntimeError: the model raised\n\nAt:\n  {path}({inner}): deeper\n  {path}({outer}): execute\n"
    )
    assert lab.logged == [("ERROR", message)]


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("raise ValueError", "ValueError: <EMPTY MESSAGE>\n\nAt:"),
        ("raise KeyError('a')", "KeyError: 'a'\n\nAt:"),
        ("raise SystemExit(3)", "SystemExit: 3\n\nAt:"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:"),
        ("raise type('PanicException', (BaseException,), {})('in Rust')", "PanicException: in Rust\n\nAt:"),
        ("raise pb_utils.TritonModelException('hey')", "TritonModelException: hey\n\nAt:"),
    ],
)
def test_an_error_is_shown_with_type_and_text(lab: Lab, statement: str, shown: str) -> None:
    message = failure(lab, f"def execute(self, requests): {statement}")
    assert message.startswith(FAILED + shown)


def test_frames_of_the_server_are_not_shown(lab: Lab) -> None:
    message = failure(lab, "def execute(self, requests): pb_utils.Tensor('', np.zeros(1))")
    assert message.startswith(
        f"{FAILED}TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  {lab.dir}/1/model.py("
    )
    assert message.count("\n  ") == 1


def test_a_model_without_execute_fails_its_requests(lab: Lab) -> None:
    message = failure(lab, "def initialize(self, args): pass")
    path = lab.dir / "1" / "model.py"
    assert message == f"{FAILED}Python model {path} does not implement `execute` method."


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("5", "Expected a list in the execute return, found type '<class 'int'>'."),
        ("(text(1),)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "[]",
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"
            ),
        ),
        (
            "[5]",
            ("Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'."),
        ),
    ],
)
def test_a_wrong_result_of_execute_fails_the_requests(lab: Lab, returned: str, reason: str) -> None:
    assert failure(lab, f"def execute(self, requests): return {returned}") == FAILED + reason


@pytest.mark.parametrize("returned", ["5", "[None]", "[text(1)]"])
def test_a_decoupled_model_must_return_none(lab: Lab, returned: str) -> None:
    assert failure(lab, f"def execute(self, requests): return {returned}", decoupled=True) == (
        f"{FAILED}Python model 'lab_0_0' is using the decoupled mode and the execute function must return None."
    )


def test_more_rows_than_the_batch_size_are_refused(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(len(requests))] * len(requests)", max_batch_size=4)
    rows = [lab.request({"IN": np.zeros((count, 1), np.float32)}) for count in (3, 2)]
    with pytest.raises(InternalError) as caught:
        lab.execute(*rows)
    assert caught.value.message == "batch size 5 for 'lab_0_0', max allowed is 4"
    lab.execute(*rows[:1])
    assert lab.response(rows[0]).error is None


def test_several_requests_for_a_model_without_batching_are_refused(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(1)] * len(requests)", max_batch_size=0)
    with pytest.raises(InternalError) as caught:
        lab.execute(lab.request(), lab.request())
    assert caught.value.message == "batch size 2 for 'lab_0_0', max allowed is 0"


def test_timings_are_marked(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(1)]")
    lab.text()
    assert lab.timings.start_ns < lab.timings.inputs_ready_ns < lab.timings.inferred_ns


def test_timings_are_marked_for_a_model_that_raises(lab: Lab) -> None:
    failure(lab, "def execute(self, requests): raise ValueError")
    assert lab.timings.start_ns < lab.timings.inputs_ready_ns < lab.timings.inferred_ns


# ---- responses ------------------------------------------------------------------------------


def test_each_request_of_a_batch_gets_its_own_response(lab: Lab) -> None:
    source = """
        def execute(self, requests):
            return [text(r.request_id()) for r in requests]
    """
    lab.load(source, max_batch_size=4)
    requests = [lab.request(id=name) for name in "abc"]
    lab.execute(*requests)
    assert [lab.response(request).outputs["OUT"][0] for request in requests] == [b"a", b"b", b"c"]


def test_a_model_may_change_the_list_of_its_requests(lab: Lab) -> None:
    source = """
        def execute(self, requests):
            return [text(requests.pop(0).request_id()) for _ in range(2)]
    """
    lab.load(source, max_batch_size=4)
    requests = [lab.request(id=name) for name in "ab"]
    lab.execute(*requests)
    assert [lab.response(request).outputs["OUT"][0] for request in requests] == [b"a", b"b"]


def test_outputs_that_are_not_requested_or_not_configured_are_omitted(lab: Lab) -> None:
    lab.load(
        """
        def execute(self, requests):
            outputs = [pb_utils.Tensor(name, np.zeros(1)) for name in ("A", "B", "C")]
            return [pb_utils.InferenceResponse(outputs) for _ in requests]
        """,
        output=[{"name": "A"}, {"name": "B"}],
    )
    assert list(lab.run().outputs) == ["A", "B"]
    assert list(lab.run(outputs=["B"]).outputs) == ["B"]


def test_an_error_response_fails_only_its_request(lab: Lab) -> None:
    source = """
        def execute(self, requests):
            error = pb_utils.TritonError("e", pb_utils.TritonError.NOT_FOUND)
            return [text("fine"), pb_utils.InferenceResponse(error=error)]
    """
    lab.load(source, max_batch_size=4)
    fine, failing = lab.request(), lab.request()
    lab.execute(fine, failing)
    assert lab.response(fine).outputs["OUT"][0] == b"fine"
    error = lab.response(failing).error
    assert (type(error), error.message) == (NotFound, "e")


def test_a_model_finds_no_arguments_of_the_worker(lab: Lab) -> None:
    lab.load("""
        import sys

        def execute(self, requests):
            return [text(self.sys.argv)]
    """)
    assert lab.text() == "['']"


def test_a_model_is_verified_by_its_methods(lab: Lab) -> None:
    lab.write("class TritonPythonModel:\n    def exekute(self, requests):\n        return []")
    with pytest.raises(InternalError, match="does not implement `execute` method"):
        lab.backend.verify(lab.arguments())


def test_a_terminal_that_is_none_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.write("class TritonPythonModel:\n    pass")
    for device, said in ((tmp_path / "nothing", "cannot be opened: No such file"), ("/dev/null", "is not a terminal")):
        arguments = msgspec.structs.replace(lab.arguments(), backend_config={"terminal": str(device)})
        with pytest.raises(InvalidArgument, match=said):
            lab.backend.complete(arguments)


def problem(lab: Lab) -> str:
    """Ask the model, and return why it is not ready."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    lab.backend.check_health(found.put)
    return found.get(timeout=60)


@pytest.mark.parametrize("define", ["def", "async def"])
@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("return True", ""),
        ("return False", "Model 'lab_0_0' is not ready (user-defined check failed)."),
        (
            "return 1",
            "Model 'lab_0_0' is not ready: is_ready() must return a boolean value, found <class 'int'>.",
        ),
        ("return None", "Model 'lab_0_0' is not ready: is_ready() must return a boolean value, found <class 'None"),
        ("1 / 0", "Model 'lab_0_0' is not ready: is_ready() failed: ZeroDivisionError: division by zero\n\nAt:\n"),
        ("raise SystemExit", "Model 'lab_0_0' is not ready: is_ready() failed: SystemExit: <EMPTY MESSAGE>\n\nAt:\n"),
    ],
)
def test_a_model_says_whether_it_is_ready(lab: Lab, define: str, statement: str, reason: str) -> None:
    lab.load(f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [text(1)]

            {define} is_ready(self):
                {statement}
    """)
    assert lab.backend.checks_health
    for _ in range(2):
        assert problem(lab).startswith(reason)
        assert reason or not problem(lab)


def test_a_model_without_is_ready_is_not_asked(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(1)]")
    assert not lab.backend.checks_health


def test_a_worker_asks_its_model_between_batches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    worker = Bench()
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: PythonBackend)
    lab.write(
        """
class TritonPythonModel:
    executed = 0

    def execute(self, requests):
        self.executed += 1
        return [text(1)]

    def is_ready(self):
        return self.executed == 1
"""
    )
    worker.hello()
    config = '{"name": "lab", "backend": "python", "output": [{"name": "OUT"}]}'
    worker.send(wire.Load(config, str(lab.dir), 1, "lab_0_0"))
    assert worker.next(wire.Loaded).checks_health
    worker.send(wire.CheckHealth(1), wire.Execute(1, [request(1)]), wire.CheckHealth(2))
    assert worker.next(wire.HealthChecked).problem == "Model 'lab_0_0' is not ready (user-defined check failed)."
    worker.next(wire.Executed)
    assert worker.next(wire.HealthChecked) == wire.HealthChecked(2)
    worker.stop()
