from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.python.logger import Logger

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab


def test_each_method_logs_at_its_level(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            logger = pb_utils.Logger
            logger.log_info("a")
            logger.log_warn("b")
            logger.log_error("c")
            logger.log_verbose("d")
            logger.log("e")
            logger.log("f", logger.WARNING)
            logger.log_info(np.array([b"g"])[0])
            return [text(1)]
    """)
    lab.text()
    assert lab.logged == [
        ("INFO", "a"),
        ("WARNING", "b"),
        ("ERROR", "c"),
        ("VERBOSE", "d"),
        ("INFO", "e"),
        ("WARNING", "f"),
        ("INFO", "g"),
    ]


def test_a_model_file_may_log_while_it_is_imported(lab: Lab) -> None:
    lab.write("pb_utils.Logger.log_info('imported')\nclass TritonPythonModel: pass")
    lab.backend.complete(lab.arguments())
    assert lab.logged == [("INFO", "imported")]


def test_log_arguments_of_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^log\(\): incompatible function arguments"):
        Logger.log_info(5)  # type: ignore[arg-type]  # as a model may
    with pytest.raises(TypeError, match=r"Invoked with: 'a', 5$"):
        Logger.log("a", 5)  # type: ignore[arg-type]  # as a model may
