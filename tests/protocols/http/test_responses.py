"""Responses of aiohttp: their content types, and what they say of the server."""

from __future__ import annotations

import json

import pytest

from protocols.http.responses import (
    SERVER_HEADER,
    empty_response,
    error_body,
    error_content_type,
    error_response,
    json_response,
    json_text_response,
)


def test_json_is_encoded_or_taken_as_it_is() -> None:
    for response in (json_response({"a": [1]}), json_text_response(b'{"a":[1]}')):
        assert (response.status, response.content_type, response.body) == (200, "application/json", b'{"a":[1]}')
        assert response.headers["Server"] == SERVER_HEADER["Server"]


@pytest.mark.parametrize(("plain", "content_type"), [(True, "text/plain"), (False, "application/json")])
def test_errors_are_json_of_either_content_type(plain: bool, content_type: str) -> None:
    response = error_response(404, "not here", plain=plain, headers={"Allow": "GET"})
    assert (response.status, response.content_type) == (404, content_type)
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {"error": "not here"}
    assert (response.headers["Allow"], response.headers["Server"]) == ("GET", SERVER_HEADER["Server"])
    assert error_content_type(plain=plain) == content_type
    assert empty_response(plain=plain).content_type == content_type


def test_bytes_that_are_not_utf_8_become_question_marks() -> None:
    assert error_body("bad \udcff file") == b'{"error":"bad ? file"}'


def test_an_empty_response_has_no_body() -> None:
    response = empty_response(status=400)
    assert (response.status, response.body) == (400, None)
