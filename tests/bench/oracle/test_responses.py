"""How the responses of two servers are compared."""

from __future__ import annotations

from bench.oracle.responses import StepResponse, cleaned, expected, is_expected, verdict
from bench.oracle.steps import get


def test_what_differs_between_runs_is_left_out() -> None:
    body = {
        "ns": 17,
        "list": [{"name": "late"}, {"name": "kept", "share": 0.123456789}],
        "path": "/here/m/1",
        "more": 1,
    }
    response = cleaned(StepResponse("http 200", body, "in /here/m, of /here"), ("late", "more"), "/here")
    assert response == StepResponse(
        "http 200", {"ns": "some", "list": [{"name": "kept", "share": 0.123457}], "path": "m/1"}, "in m, of MODELS"
    )


def test_not_a_number_is_the_same_as_itself() -> None:
    one, other = (cleaned(StepResponse("http 200", [float("nan")]), (), "/here") for _ in range(2))
    assert verdict(one, other) == "same"


def test_status_body_and_wording_are_distinguished() -> None:
    response = StepResponse("http 400", {}, "no")
    assert verdict(StepResponse("http 500", {}, "no"), response) == "status"
    assert verdict(StepResponse("http 400", {"a": 1}, "no"), response) == "body"
    assert verdict(StepResponse("http 400", {}, None), response) == "body"
    assert verdict(StepResponse("http 400", {}, "never"), response) == "wording"
    assert verdict(StepResponse("broken", None, "closed"), response) == "broken"


def test_a_difference_has_the_values_of_our_response() -> None:
    step = get("/").differs("for a reason", status="http 404", body=...)
    wanted = expected(StepResponse("http 200", {"a": 1}, "text"), step.difference)
    assert is_expected(StepResponse("http 404", {"b": 2}, "text"), wanted)
    assert not is_expected(StepResponse("http 404", {"b": 2}, "another text"), wanted)
    assert not is_expected(StepResponse("http 200", {"a": 1}, "text"), wanted)


def test_the_digest_of_a_request_does_not_depend_on_our_response() -> None:
    assert get("/").digest() == get("/").differs("for a reason", status="http 404").digest()
    assert get("/").digest() != get("/v2").digest()
