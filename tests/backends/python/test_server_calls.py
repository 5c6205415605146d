from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.python.failures import TritonModelException

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab


def test_a_model_may_import_unsupported_functions(lab: Lab) -> None:
    lab.load("""
        from triton_python_backend_utils import is_model_ready, load_model, unload_model

        CALLS = [is_model_ready, load_model, unload_model]

        class TritonPythonModel:
            def execute(self, requests):
                return [text(len(CALLS))]
    """)
    assert lab.text() == "3"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("load_model('m', files={})", "load_model"),
        ("unload_model('m', unload_dependents=True)", "unload_model"),
        ("is_model_ready('m', '1')", "is_model_ready"),
    ],
)
def test_a_call_of_an_unsupported_function_raises(lab: Lab, call: str, named: str) -> None:
    lab.load(f"""
        def execute(self, requests):
            try:
                pb_utils.{call}
            except pb_utils.TritonModelException as error:
                return [text(error)]
    """)
    assert lab.text().endswith(f"({named}) is not supported by this version of the server yet")
    assert issubclass(TritonModelException, Exception)
