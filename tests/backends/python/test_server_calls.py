from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

#: Calls a function of the server in `initialize`, and shows what it returned or raised.
MODEL = """
    class TritonPythonModel:
        def initialize(self, args):
            try:
                self.found = pb_utils.{call}
            except (pb_utils.TritonModelException, TypeError) as error:
                self.found = str(error).splitlines()[0]

        def execute(self, requests):
            return [text(self.found)]
"""


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("load_model('m')", {"action": "load", "config": None, "files": None}),
        ("load_model('m', '{}')", {"action": "load", "config": "{}"}),
        ("load_model('m', files={'file:1/m': b'x'})", {"action": "load", "files": {"file:1/m": b"x"}}),
        ("load_model(model_name='m', config='{}', files={})", {"action": "load", "files": {}}),
        ("unload_model('m')", {"action": "unload", "unload_dependents": False}),
        ("unload_model('m', unload_dependents=True)", {"action": "unload", "unload_dependents": True}),
        ("unload_model('m', 5)", {"action": "unload", "unload_dependents": True}),
        ("is_model_ready('m')", {"action": "ready", "version": ""}),
        ("load_model(b'm', b'{}')", {"action": "load", "config": "{}"}),
        ("unload_model(b'm')", {"action": "unload", "unload_dependents": False}),
        ("is_model_ready(b'm', b'3')", {"action": "ready", "version": "3"}),
        ("is_model_ready('m', '3')", {"action": "ready", "version": "3"}),
    ],
)
def test_a_model_controls_models_while_it_is_loaded(lab: Lab, call: str, wanted: dict[str, object]) -> None:
    lab.recorded_calls.ready = True
    lab.load(MODEL.format(call=call))
    assert lab.text() == str(True if "ready" in call else None)
    (found,) = lab.recorded_calls.controlled
    assert found["model_name"] == "m"
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("load_model('m')", "Failed to load model"),
        ("unload_model('m')", "Failed to unload model"),
        ("is_model_ready('m', 'x')", "Failed to check model readiness"),
    ],
)
def test_an_error_of_the_server_has_the_text_of_triton(lab: Lab, call: str, text: str) -> None:
    lab.recorded_calls.control_error = InvalidArgument("not this one")
    lab.load(MODEL.format(call=call))
    assert lab.text() == f"{text}: Failed to process the request for model 'lab_0_0', message: not this one"


@pytest.mark.parametrize(
    "call",
    [
        "load_model(5)",
        "load_model('m', 5)",
        "load_model('m', files={'file:x': 'text'})",
        "load_model('m', files={5: b'x'})",
        "unload_model(None)",
        "unload_model('m', None)",
        "unload_model('m', 'yes')",
        "is_model_ready('m', 1)",
    ],
)
def test_arguments_of_wrong_types_are_refused(lab: Lab, call: str) -> None:
    lab.load(MODEL.format(call=call))
    assert "incompatible function arguments" in lab.text()
    assert not lab.recorded_calls.controlled


def test_files_must_be_a_dictionary(lab: Lab) -> None:
    lab.load(MODEL.format(call="load_model('m', files=[])"))
    assert lab.text() == "failed to parse `files` when loading model: not a dictionary"
