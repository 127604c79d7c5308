"""Where Redis is: URLs of every kind become one redis-py connection pool.

    redis://[user:password@]host:port/db          plain TCP
    rediss://...?ssl_ca_certs=...                 TLS
    unix:///path/to/socket?db=0                   Unix socket
    redis+sentinel://[user:password@]host:port,host:port/service/db
    rediss+sentinel://...                         the same, TLS to the master

redis-py does what is hard about connections (TLS, authentication); what is sent over them is
`pipeline`'s business. Options after `?` are redis-py's own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from aqua_protocol import ConfigError
from aqua_protocol.supervision import start_job

SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
DEFAULT_SENTINEL_PORT: Final = 26_379
"""Fixed by Redis."""
SENTINELS_SHARE: Final = 0.2
"""Of the time to connect, for Sentinels: 1 s by default, and only where no majority answers.
Doubled, a coordinator that hears from fewer is connected a second later."""


def open_pool(url: str, *, connect_timeout_s: float, max_connections: int) -> ConnectionPool:
    """A pool of connections to the Redis that `url` names; nothing is connected yet.

    Raises:
        ConfigError: Not a URL of the kinds above.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ConfigError(
            f"AQUA_REDIS_URL has the unknown scheme {scheme!r}",
            remedy=f"Use one of {', '.join(f'{name}://' for name in SCHEMES)}.",
        )
    # Retries are the pipeline's: only it knows which commands are safe to repeat. Timeouts as
    # well: one timer for a batch instead of one for every answer.
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
        "max_connections": max_connections,
    }
    try:
        if scheme.endswith("+sentinel"):
            return _sentinel_pool(url, options)
        return ConnectionPool.from_url(url, **options)
    except (ValueError, TypeError):
        raise ConfigError(
            "AQUA_REDIS_URL is not a Redis URL",
            remedy="For example redis://user:password@host:6379/0, percent-encoding the password.",
        ) from None  # Its message may hold a piece of the password.


async def close_pool(pool: ConnectionPool) -> None:
    """Close every connection of the pool, and those to its Sentinels."""
    await pool.aclose()
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


class _Sentinels(Sentinel):
    """Sentinels that are asked all at once; redis-py asks them in turn and takes the first answer.

    A Sentinel that stands still, as when its machine is lost with the master's, then hides none of
    the others; and one that is cut off from them does not hide that they chose another master.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Where the master is by the latest choice that a majority of the Sentinels tells of.

        Raises:
            MasterNotFoundError: None of those that answer names one that it reaches.
        """
        answers = asyncio.Queue[dict[str, Any] | BaseException]()

        async def ask(sentinel: Any) -> None:  # noqa: ANN401 - redis-py types them in part
            answers.put_nowait((await sentinel.sentinel_masters()).get(service_name, {}))

        asked = [start_job(ask(sentinel), answers.put_nowait) for sentinel in self.sentinels]
        named, silent = list[dict[str, Any]](), list[str]()
        try:
            for heard in range(1, len(asked) + 1):
                said = await answers.get()
                if isinstance(said, RedisError):
                    silent.append(str(said))
                elif isinstance(said, BaseException):
                    raise said
                elif said and self.check_master_state(said, service_name):
                    named.append(said)
                if named and heard - len(silent) > len(asked) / 2:
                    break
        finally:
            for job in asked:
                job.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not named:
            raise MasterNotFoundError("; ".join([f"no master of {service_name!r}", *silent]))
        latest = max(named, key=lambda state: state["config-epoch"])
        return latest["ip"], latest["port"]


def _sentinel_pool(url: str, options: dict[str, Any]) -> SentinelConnectionPool:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    sentinels = [urlsplit(f"//{host}") for host in hosts.split(",")]
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not all(sentinel.hostname for sentinel in sentinels):
        message = "a Sentinel URL needs hosts, and the service name as its path"
        raise ValueError(message)
    timeout_s = SENTINELS_SHARE * options["socket_connect_timeout"]
    # The Sentinels' own credentials, where they have any: `sentinel_username`, `sentinel_password`.
    query = dict(parse_qsl(parts.query))
    own = {name: query.pop(name) for name in [*query] if name.startswith("sentinel_")}
    manager = _Sentinels(  # type: ignore[no-untyped-call] # redis-py types Sentinel in part
        [(sentinel.hostname, sentinel.port or DEFAULT_SENTINEL_PORT) for sentinel in sentinels],
        sentinel_kwargs={
            "socket_connect_timeout": timeout_s,
            "socket_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **{name.removeprefix("sentinel_"): value for name, value in own.items()},
        },
    )
    return SentinelConnectionPool(  # type: ignore[no-untyped-call] # as above
        service,
        manager,
        ssl=parts.scheme.startswith("rediss"),
        db=int(database or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
        **query,
        **options,
    )
