"""Settings of caches on the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import BlockingConnectionPool, SSLConnection

from kernel.cache.caching import make_cache
from kernel.cache.config import CacheChoice, local_byte_size, parse_cache_config
from kernel.cache.local import LocalCache
from kernel.cache.redis_store import PASSWORD_VARIABLE, USER_VARIABLE, RedisSettings, RedisStore, redis_settings
from kernel.cache.stored import StoredCache
from kernel.errors import InvalidArgument
from kernel.testing import FakeClock
from shm.blocks import ByteBudget

if TYPE_CHECKING:
    from pathlib import Path


def test_values_name_one_cache_and_its_settings() -> None:
    values = ["redis,host=a", "redis,port=1", "redis,password=x=,y", "redis,host=b"]
    assert parse_cache_config(values) == CacheChoice("redis", {"host": "b", "port": "1", "password": "x=,y"})
    assert parse_cache_config([]) is None
    assert parse_cache_config([], 5) == CacheChoice("local", {"size": "5"})


def test_only_one_cache_is_allowed() -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_cache_config(["local,size=1", "redis,host=a"])
    assert error.value.message == "found multiple cache configurations, but only a single cache is currently supported"


@pytest.mark.parametrize("value", ["local", "local,size", "local,size=", ",size=1", "size=1", "local,=1"])
def test_a_value_in_another_form_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_cache_config([value])
    assert error.value.message == f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {value}"


def test_a_local_cache_takes_at_most_half_of_the_servers_budget() -> None:
    assert local_byte_size({"size": "500"}, 1000) == 500
    with pytest.raises(InvalidArgument) as error:
        local_byte_size({"size": "501"}, 1000)
    assert error.value.message == (
        "--cache-config=local,size=501 is more than half of the 1000 bytes that tensors may take together "
        "(--memory-byte-size), expected at most half"
    )


@pytest.mark.parametrize("settings", [{}, {"size": "0"}, {"size": "-1"}, {"size": "1k"}, {"size": "9" * 30}])
def test_a_local_cache_needs_a_size(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument) as error:
        local_byte_size(settings, 1 << 40)
    assert error.value.message.startswith("--cache-config=local needs a size in bytes, such as")


def test_unknown_settings_are_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidArgument) as error:
        local_byte_size({"size": "1", "sized": "1"}, 1000)
    assert error.value.message == "cache 'local' has no setting 'sized'; its settings are size"
    with pytest.raises(InvalidArgument) as error:
        redis_settings({"hosts": "a"})
    assert error.value.message.startswith("cache 'redis' has no setting 'hosts'; its settings are host, user, ")


def test_settings_of_redis_have_tritons_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USER_VARIABLE, raising=False)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert redis_settings({"host": "a"}) == RedisSettings(host="a")
    given = {
        "host": "a", "port": "1", "user": "u", "password": "p", "db": "2", "connect_timeout": "3",
        "socket_timeout": "4", "pool_size": "5", "wait_timeout": "6", "tls_enabled": "TRUE", "cert": "c", "key": "k",
        "cacert": "ca", "cert_dir": "cd", "ttl": "7", "max_byte_size": "8",
    }  # fmt: skip
    assert redis_settings(given) == RedisSettings(
        host="a", port=1, user="u", password="p", db=2, connect_ms=3, socket_ms=4, pool_size=5, wait_ms=6, tls=True,
        cert="c", key="k", cacert="ca", cert_dir="cd", ttl_s=7, max_byte_size=8,
    )  # fmt: skip


def test_no_limit_of_time_means_ours() -> None:
    given = {"host": "a", "socket_timeout": "0", "connect_timeout": "0", "wait_timeout": "0", "pool_size": "0"}
    assert redis_settings(given) == RedisSettings(host="a")


def test_user_and_password_come_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("secret\n")
    monkeypatch.setenv("REDIS_USER", "somebody")
    read = redis_settings({"host": "a", "user": "$REDIS_USER", "password": f"@{tmp_path / 'password'}"})
    assert (read.user, read.password) == ("somebody", "secret")
    monkeypatch.setenv(USER_VARIABLE, "u")
    monkeypatch.setenv(PASSWORD_VARIABLE, "p")
    assert redis_settings({"host": "a"}) == RedisSettings(host="a", user="u", password="p")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "--cache-config=redis needs a host, such as --cache-config=redis,host=localhost"),
        ({"host": "a", "port": "x"}, "setting 'port' of cache 'redis' must be a whole number from 0 on; got 'x'"),
        ({"host": "a", "tls_enabled": "1"}, "setting 'tls_enabled' of cache 'redis' must be true or false; got '1'"),
        (
            {"host": "a", "password": "$NOT_SET_AT_ALL"},
            "setting 'password' of cache 'redis' names the variable NOT_SET_AT_ALL, which is not set",
        ),
    ],
)
def test_wrong_settings_of_redis_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        redis_settings(settings)
    assert error.value.message == text


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"setting 'password' of cache 'redis' cannot be read: .*/not/there"):
        redis_settings({"host": "a", "password": "@/not/there"})


def test_redis_gets_the_settings_of_its_connections() -> None:
    settings = RedisSettings(
        host="a", port=1, user="u", password="p", db=2, connect_ms=3000, socket_ms=4000, pool_size=5, wait_ms=6000,
        tls=True, cacert="ca.pem",
    )  # fmt: skip
    pool = RedisStore(settings)._redis.connection_pool
    assert isinstance(pool, BlockingConnectionPool)
    assert (pool.max_connections, pool.timeout) == (5, 6)
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    assert isinstance(connection, SSLConnection)
    assert (connection.host, connection.port, connection.username, connection.password) == ("a", 1, "u", "p")
    assert (connection.db, connection.socket_connect_timeout, connection.socket_timeout) == (2, 3, 4)
    assert connection.ca_certs == "ca.pem"


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidArgument) as error:
        RedisStore(RedisSettings(host="a"))
    assert error.value.message == (
        "--cache-config=redis needs the Python package redis: pip install '.[redis]' (in a checkout of Naiad)"
    )


def test_the_cache_that_is_asked_for_is_made() -> None:
    budget, clock = ByteBudget(1 << 20), FakeClock()
    local = make_cache(CacheChoice("local", {"size": "1000"}), clock, budget)
    assert isinstance(local, LocalCache)
    assert (local.figures.byte_size, local.shared) == (1000, False)
    redis = make_cache(CacheChoice("redis", {"host": "localhost"}), clock, budget)
    assert isinstance(redis, StoredCache)
    assert redis.shared
    with pytest.raises(InvalidArgument) as error:
        make_cache(CacheChoice("memcached", {"a": "b"}), clock, budget)
    assert error.value.message == (
        "unable to find cache 'memcached'; caches are local, redis. Packages add others with entry points of the group "
        "'naiad.caches'"
    )
