"""Poison for the books: what can be written to their keys by whoever can write to Redis.

The keys and their fields are found in Redis, so those that are new are poisoned as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Words: TypeAlias = list[str | bytes]
"""A command to Redis."""

ODD: Final[Sequence[str | bytes]] = (
    *("", "junk", "nan", "inf", "-inf", "-1", "0", "1", "1.5", "1e308", "0x10", " 7"),
    *("9007199254740991", "-9007199254740991", "9007199254740993", "18446744073709551615"),
    *("!!", "a b", "a\nb", "é", b"\xff\xfe", "\0", "x" * 600, "null", "{}", "[1]"),
    *("released", "active", "granted", "producer", "consumer-0", "lender-0", "1 1 1"),
)
SCORES: Final = ("-inf", "inf", "0", "-1", "1.5", "1e300", "9007199254740991", "-9007199254740991")
LAST_ID: Final = "18446744073709551615-18446744073709551615"
"""Behind it a stream takes nothing more."""

_SNAPSHOT: Final = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1] = {key, redis.call('DUMP', key), redis.call('PEXPIRETIME', key)}
end
return found
"""

Snapshot: TypeAlias = dict[bytes, tuple[bytes, int]]
"""Of each key what it holds, and when it expires."""


def snapshot_of(client: Any) -> Snapshot:  # noqa: ANN401 - redis-py types answers in part
    """Everything that Redis holds, bit for bit."""
    return {key: (dump, at_ms) for key, dump, at_ms in client.eval(_SNAPSHOT, 0)}


def restore(client: Any, snapshot: Snapshot) -> None:  # noqa: ANN401 - as above
    """Make Redis hold this and nothing else."""
    with client.pipeline(transaction=False) as pipe:
        pipe.flushall()
        for key, (dump, at_ms) in snapshot.items():
            pipe.restore(key, max(at_ms, 0), dump, absttl=True)
        pipe.execute()


def poison(client: Any, draw: random.Random) -> list[Words]:  # noqa: ANN401 - as above
    """Write something to a key of the books that no step would have written; says what."""
    key = draw.choice(sorted(client.keys("*")))
    kind: str = client.type(key).decode()
    ttl_ms: int = client.pttl(key)
    words: list[Words] = []
    if draw.random() < 1 / 4:
        words = [["DEL", key]]
        client.delete(key)
        kind = draw.choice(["", "string", "hash", "list", "set", "zset", "stream"])
    words += _of_type(client, key, kind, draw)
    for command in words:
        client.execute_command(*command)
    if ttl_ms > 0:  # What would have expired is not to stay: nobody may ever look at it.
        client.pexpire(key, ttl_ms)
    return words


def _of_type(client: Any, key: bytes, kind: str, draw: random.Random) -> list[Words]:  # noqa: ANN401 - as above
    odd = draw.choice(ODD)
    words: Words = []
    match kind:
        case "string":
            parts = (client.get(key) or b"").split(b"\n")
            at = draw.randrange(len(parts))
            parts[at] = odd if isinstance(odd, bytes) else odd.encode()
            words = ["SET", key, draw.choice([b"\n".join(parts), b"\n".join(parts[:at]), odd])]
        case "hash":
            field = draw.choice([*sorted(client.hkeys(key)), b"odd"])
            words = draw.choice([["HSET", key, field, odd], ["HDEL", key, field]])
        case "zset":
            member = draw.choice([*sorted(client.zrange(key, 0, -1)), odd])
            score = draw.choice(SCORES)
            words = draw.choice([["ZADD", key, score, member], ["ZREM", key, member]])
        case "set":
            words = ["SADD", key, odd]
        case "list":
            words = ["RPUSH", key, odd]
        case "stream":
            is_full = client.exists(key) and (
                client.xinfo_stream(key)["last-generated-id"].decode() == LAST_ID
            )
            position = draw.choice(["*", "*", LAST_ID])
            words = ["XADD", key, position, draw.choice(["event", "key", "odd"]), odd]
            words = ["XTRIM", key, "MAXLEN", "0"] if is_full else words
    return [words] if words else []
