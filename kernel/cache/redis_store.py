"""Responses in Redis, by redis-py's asyncio client. Settings have the names of Triton's redis cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.cache.config import SIGNING_KEY_FILE, refuse_unknown
from kernel.errors import InvalidArgument
from kernel.texts import install_command

if TYPE_CHECKING:
    from redis.asyncio import Redis

REDIS = "redis"

#: Read if the settings have no user or password, as in Triton.
USER_VARIABLE = "TRITONCACHE_REDIS_USERNAME"
PASSWORD_VARIABLE = "TRITONCACHE_REDIS_PASSWORD"

_DEFAULT_CONNECT_MS = 1000
_DEFAULT_SOCKET_MS = 200


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to connect to. Times are in milliseconds; Triton has no limits by default, so there is 0 for the default."""

    host: str
    port: int = 6379
    user: str = ""
    password: str = ""
    db: int = 0
    connect_ms: int = _DEFAULT_CONNECT_MS
    #: How long a lookup or an insertion may take, with all that it waits for.
    socket_ms: int = _DEFAULT_SOCKET_MS
    pool_size: int = 32
    #: How long a lookup or an insertion may wait for a connection of the pool.
    wait_ms: int = _DEFAULT_SOCKET_MS
    tls: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cert_dir: str = ""
    #: Seconds after which an entry ends; 0 for never. Triton has no such setting.
    ttl_s: int = 0
    #: The largest response in bytes that is stored. Triton has no such setting.
    max_byte_size: int = 1 << 20


#: Names of settings on the command line → of `RedisSettings`.
_TEXTS = {"host": "host", "user": "user", "password": "password", "cert": "cert", "key": "key", "cacert": "cacert",
          "cert_dir": "cert_dir"}  # fmt: skip
_NUMBERS = {"port": "port", "db": "db", "connect_timeout": "connect_ms", "socket_timeout": "socket_ms",
            "pool_size": "pool_size", "wait_timeout": "wait_ms", "ttl": "ttl_s",
            "max_byte_size": "max_byte_size"}  # fmt: skip
_SWITCHES = {"tls_enabled": "tls"}
#: Numbers for which 0 stands for our default: a wait always has an end.
_POSITIVE = ("connect_timeout", "socket_timeout", "pool_size", "wait_timeout", "max_byte_size")


def redis_settings(settings: dict[str, str]) -> RedisSettings:
    """Read the settings of --cache-config=redis. Reads files and variables of passwords. Raises `InvalidArgument`."""
    refuse_unknown(REDIS, settings, (*_TEXTS, *_NUMBERS, *_SWITCHES, SIGNING_KEY_FILE))
    if not settings.get("host"):
        raise InvalidArgument("--cache-config=redis needs a host, such as --cache-config=redis,host=localhost")
    found: dict[str, str | int | bool] = {}
    for name, text in settings.items():
        if name == SIGNING_KEY_FILE:  # of every cache: `kernel.cache.caching` reads it
            continue
        if name in _TEXTS:
            found[_TEXTS[name]] = _secret(name, text) if name in ("user", "password") else text
        elif name in _NUMBERS:
            number = _number(name, text)
            if number or name not in _POSITIVE:
                found[_NUMBERS[name]] = number
        elif text.lower() not in ("true", "false"):
            raise InvalidArgument(f"setting '{name}' of cache 'redis' must be true or false; got '{text}'")
        else:
            found[_SWITCHES[name]] = text.lower() == "true"
    found.setdefault("user", os.environ.get(USER_VARIABLE, ""))
    found.setdefault("password", os.environ.get(PASSWORD_VARIABLE, ""))
    return msgspec.convert(found, RedisSettings)


def _secret(name: str, text: str) -> str:
    """Return a secret that is written as @FILE, $VARIABLE, or as it is."""
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_text().rstrip("\r\n")
        except OSError as error:
            raise InvalidArgument(f"setting '{name}' of cache 'redis' cannot be read: {error}") from None
    if text.startswith("$"):
        value = os.environ.get(text[1:])
        if value is None:
            raise InvalidArgument(f"setting '{name}' of cache 'redis' names the variable {text[1:]}, which is not set")
        return value
    return text


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidArgument(f"setting '{name}' of cache 'redis' must be a whole number from 0 on; got '{text}'")
    return int(text)


class RedisStore:
    """Implements `kernel.cache.interface.CacheStore`."""

    def __init__(self, settings: RedisSettings) -> None:
        """Raises `InvalidArgument` if the package is missing. Connects at the first call."""
        try:
            from redis import asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ModuleNotFoundError:
            raise InvalidArgument(
                f"--cache-config=redis needs the Python package redis: {install_command('redis')}"
            ) from None
        tls: dict[str, Any] = {
            "ssl_certfile": settings.cert or None,
            "ssl_keyfile": settings.key or None,
            "ssl_ca_certs": settings.cacert or None,
            "ssl_ca_path": settings.cert_dir or None,
        }
        pool = redis.BlockingConnectionPool(
            max_connections=settings.pool_size,
            timeout=settings.wait_ms / 1000,
            connection_class=redis.SSLConnection if settings.tls else redis.Connection,
            host=settings.host,
            port=settings.port,
            db=settings.db,
            username=settings.user or None,
            password=settings.password or None,
            socket_connect_timeout=settings.connect_ms / 1000,
            socket_timeout=settings.socket_ms / 1000,
            retry=Retry(NoBackoff(), 0),  # a failed lookup is a miss, and the next one tries again
            protocol=2,  # nothing of protocol 3 is needed, and every Redis speaks this one
            **(tls if settings.tls else {}),
        )
        self._ttl_s = settings.ttl_s or None
        self._redis: Redis = redis.Redis.from_pool(pool)

    async def get(self, key: str) -> bytes | None:
        value = await self._redis.get(key)
        assert not isinstance(value, str), "a client that decodes texts"
        return value

    async def put(self, key: str, value: bytes) -> None:
        await self._redis.set(key, value, ex=self._ttl_s)

    async def close(self) -> None:
        await self._redis.aclose()
