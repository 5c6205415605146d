from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import BadOption
from kernel.options import OpenAiOptions
from protocols.openai.api_keys import MAX_BYTE_SIZE, ApiKey, ApiKeys, KeyUse, parse_keys
from protocols.openai.errors import ApiError
from tests.protocols.openai.door import ASKED, CHAT, Door, Script, config, run

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.serving.request import Request

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
        ("a k tokens_per_minute=0", "line 1 has 'tokens_per_minute=0', expected tokens_per_minute=NUMBER, at least 1"),
        ("a k requests_per_minute=many", "line 1 has 'requests_per_minute=many', expected"),
        ("a k requests_per_minute=1 requests_per_minute=2", "line 1 has requests_per_minute twice"),
        ("a k\nb l token_per_minute=2", "line 2 has a word with '=' that is no limit, expected requests_per_minute or"),
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


S = 1_000_000_000


def refused(use: KeyUse, key: ApiKey, at_s: float) -> int:
    """Return after how many seconds a request may come again that comes at this time; 0 if it is taken."""
    try:
        use.begin(key, int(at_s * S))
    except ApiError as error:
        return error.retry_after_s
    return 0


def test_requests_of_a_key_are_limited_and_come_back_one_by_one() -> None:
    key, use = ApiKey("ann", b"", requests_per_minute=6), KeyUse()
    assert [refused(use, key, 1000) for _ in range(7)] == [0] * 6 + [10]
    assert [refused(use, key, 1009), refused(use, key, 1010), refused(use, key, 1011)] == [1, 0, 9]
    assert [refused(use, key, 1200) for _ in range(7)] == [0] * 6 + [10]


def test_tokens_of_a_key_are_taken_when_they_have_come() -> None:
    key, use = ApiKey("ann", b"", tokens_per_minute=60), KeyUse()
    assert refused(use, key, 1000) == 0
    use.spend(180)
    assert refused(use, key, 1000) == 121
    assert [refused(use, key, 1120), refused(use, key, 1121)] == [1, 0]


def test_limits_stand_in_the_line_of_a_key_and_its_use_outlives_a_reload(path: Path) -> None:
    path.write_text("ann sk-all talk tokens_per_minute=9 other requests_per_minute=5")
    keys = ApiKeys(path)
    ann = keys.find("Bearer sk-all")
    assert (ann.models, ann.requests_per_minute, ann.tokens_per_minute) == (frozenset({"talk", "other"}), 5, 9)
    use = keys.use_of(ann)
    path.write_text("ann sk-new tokens_per_minute=9\nshop sk-some")
    keys.look()
    assert keys.use_of(keys.find("Bearer sk-new")) is use
    assert not keys.find("Bearer sk-some").is_limited


def test_a_key_without_requests_or_tokens_left_gets_429_with_the_time_to_wait(path: Path) -> None:
    path.write_text("ann sk-ann requests_per_minute=2\nshop sk-shop tokens_per_minute=10\nfree sk-free")

    async def test(door: Door) -> None:
        async def ask(key: str, path: str = CHAT) -> tuple[int, str | None, Any]:
            async with door.session.post(path, json=ASKED, headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status, response.headers.get("Retry-After"), await response.json()

        assert [(await ask("sk-ann"))[0] for _ in range(3)] == [200, 200, 429]
        status, retry_after, body = await ask("sk-shop")
        assert status == 200
        status, retry_after, body = await ask("sk-shop")
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            429, "rate_limit_error", "rate_limit_exceeded",
        )  # fmt: skip
        assert retry_after is not None
        assert 60 < int(retry_after) <= 66
        assert "The API key 'shop' has used its 10 tokens a minute" in body["error"]["message"]
        assert [(await ask("sk-free"))[0] for _ in range(5)] == [200] * 5
        async with door.session.get("/v1/models", headers={"Authorization": "Bearer sk-ann"}) as response:
            assert response.status == 200  # lists are no inference

    def respond(script: Script, request: Request) -> None:
        script.send(request, "some", num_input_tokens=12, num_output_tokens=8)
        script.end(request)

    outputs = ("text_output", "num_input_tokens", "num_output_tokens")
    run(test, (config("talk", outputs), Script(respond)), openai=OpenAiOptions(api_keys=path))
