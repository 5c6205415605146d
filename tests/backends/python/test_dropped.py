from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

DROPPED = "Python model 'lab_0_0' dropped the request without sending a final response"


@pytest.mark.parametrize("returned", ["None", "[None]"])
@pytest.mark.parametrize("sender", ["pass", "requests[0].get_response_sender()"])
def test_a_request_without_response_that_the_model_does_not_keep_fails(lab: Lab, returned: str, sender: str) -> None:
    lab.load(f"""
        def execute(self, requests):
            {sender}
            return {returned}
    """)
    error = lab.run().error
    assert (type(error), error.message) == (InternalError, DROPPED)
    assert lab.logged == [("ERROR", DROPPED)]


def test_a_cancelled_request_that_the_model_drops_is_not_logged(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            return None
    """)
    lab.cancelled = True
    assert lab.run().error.message == DROPPED
    assert not lab.logged


def test_a_missing_final_flag_after_a_response_is_added(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            requests[0].get_response_sender().send(text("sent"))
    """)
    request = lab.request()
    lab.execute(request)
    response, flag = lab.responses(request)
    assert response.outputs["OUT"][0] == b"sent"
    assert flag.empty


def test_a_decoupled_request_without_final_flag_fails(lab: Lab) -> None:
    lab.load(
        """
        def execute(self, requests):
            requests[0].get_response_sender().send(text("first"))
        """,
        decoupled=True,
    )
    request = lab.request()
    lab.execute(request)
    first, last = lab.responses(request)
    assert first.error is None
    assert last.error.message == DROPPED


def test_a_kept_request_stays_open_until_it_is_dropped(lab: Lab) -> None:
    lab.load(
        """
        class TritonPythonModel:
            kept = None

            def execute(self, requests):
                self.kept = requests[0]
        """,
        decoupled=True,
    )
    first, second = lab.request(), lab.request()
    lab.execute(first)
    assert not first.finished
    lab.execute(second)
    assert lab.response(first).error.message == DROPPED
    assert not second.finished


def test_a_model_has_no_thread_for_this_before_its_first_request(lab: Lab) -> None:
    before = set(threading.enumerate())
    lab.load("""
        def execute(self, requests):
            return [text(1)]
    """)
    assert set(threading.enumerate()) <= before
    lab.run()
    lab.run()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["dropped requests"]
