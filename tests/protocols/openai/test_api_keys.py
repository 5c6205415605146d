from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.options import OpenAiOptions
from protocols.openai.api_keys import MAX_BYTE_SIZE, ApiKeys, parse_keys
from protocols.openai.errors import ApiError
from tests.protocols.openai.door import ASKED, CHAT, Door, Script, config, run

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
# name  key        models
ann     sk-all
shop    sk-some    talk other
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(FILE)
    return tmp_path / "keys"


def test_a_key_is_for_all_models_or_for_those_of_its_line(path: Path) -> None:
    keys = ApiKeys(path)
    ann, shop = keys.find("Bearer sk-all"), keys.find("bearer  sk-some ")
    assert (ann.name, ann.admits("any"), shop.name) == ("ann", True, "shop")
    assert [shop.admits(model) for model in ("talk", "other", "any")] == [True, True, False]


@pytest.mark.parametrize("header", [None, "", "sk-all", "Basic sk-all", "Bearer", "Bearer ", "Bearer sk-al",
                                    "Bearer sk-all2", "Bearer ann", "Bearer \udcff"])  # fmt: skip
def test_no_key_and_another_key_are_401(path: Path, header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        ApiKeys(path).find(header)
    assert (caught.value.status, caught.value.code_text) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ann", "line 1 has one word"),
        ("# only\n", "it has no key"),
        ("a k\na l", "line 2 has the name 'a' again"),
        ("a k\n\nb k", "line 3 has the same key as 'a'"),
        ("a ké", "line 1 has a name or a key that is not of printable ASCII"),
    ],
)
def test_a_wrong_file_is_an_error_that_shows_no_key(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_keys(text)
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadOption, match=f"--openai-api-keys: the file .* cannot be used: {reason}"):
        ApiKeys(tmp_path / "keys")


def test_a_file_that_is_not_there_is_no_text_or_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="cannot be used: No such file or directory"):
        ApiKeys(tmp_path / "none")
    for content, reason in ((b"a \xff", "it is not UTF-8"), (b"#" * (MAX_BYTE_SIZE + 1), "it has more than")):
        (tmp_path / "keys").write_bytes(content)
        with pytest.raises(BadOption, match=reason):
            ApiKeys(tmp_path / "keys")


def test_a_changed_file_is_used_and_a_wrong_one_is_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = ApiKeys(path)
    path.write_text("new sk-new")
    keys.look()
    assert keys.find("Bearer sk-new").name == "new"
    with pytest.raises(ApiError):
        keys.find("Bearer sk-all")
    path.write_text("wrong")
    keys.look()
    assert keys.find("Bearer sk-new").name == "new"
    assert "the API keys stay as they are" in caplog.text
    assert "sk-" not in caplog.text


def test_requests_need_a_key_that_is_for_their_model(path: Path) -> None:
    async def test(door: Door) -> None:
        ann, shop = {"Authorization": "Bearer sk-all"}, {"Authorization": "Bearer sk-some"}
        assert (await door.post(CHAT, ASKED))[0] == 401
        assert (await door.get("/v1/models"))[0] == 401
        assert (await door.post(CHAT, ASKED, headers=shop))[0] == 200
        assert script.requests[-1].sink.header("naiad-api-key") == "shop"
        for length in (1, 100_000):
            messages = [{"role": "user", "content": "x" * length}]
            status, body = await door.post(CHAT, {"model": "secret", "messages": messages}, headers=shop)
            assert status == 403
            assert body["error"]["message"] == "The API key 'shop' is not for model 'secret'"
        assert (await door.post(CHAT, {**ASKED, "model": "secret"}, headers=ann))[0] == 200
        async with door.session.get("/v1/models", headers=shop) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["talk"]
        async with door.session.get("/v1/models/secret", headers=shop) as response:
            assert response.status == 403
        async with door.session.get("/health/ready") as response:
            assert response.status == 200

    script = Script()
    run(test, (config("talk"), script), (config("secret"), Script()), openai=OpenAiOptions(api_keys=path))


def test_a_client_cannot_choose_the_name_of_its_key(path: Path) -> None:
    async def test(door: Door) -> None:
        headers = {"Authorization": "Bearer sk-all", "naiad-api-key": "shop"}
        await door.post(CHAT, ASKED, headers=headers)
        assert script.requests[-1].sink.header("naiad-api-key") == "ann"

    script = Script()
    run(test, (config("talk"), script), openai=OpenAiOptions(api_keys=path))
