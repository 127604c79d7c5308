"""A Redis in this process: the commands that the books use, Lua 5.1, and a clock that is told.

For simulations, which want thousands of histories a minute on a virtual clock. It runs the very
library of functions that a real server gets. What it promises is that each command answers as Redis
does, and `tests/integration/coordinator/test_redis_on_paper.py` compares the two word by word; what
the books do not use is not here and raises.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from lupa import lua51

Reply: TypeAlias = Any
"""bytes, int, None, or a list of these; what a client of Redis gets."""

VERSION: Final = "7.4.0"


class ScriptError(Exception):
    """A script or a command has failed, as Redis' own error reply."""


class _Scores(dict[bytes, float]):
    """A sorted set: scores by member, and the order, made when it is asked for."""

    order: list[tuple[float, bytes]] | None = None

    def ranked(self) -> list[tuple[float, bytes]]:
        if self.order is None:
            self.order = sorted((score, member) for member, score in self.items())
        return self.order


class _Stream(list[tuple[bytes, list[bytes]]]):
    """Entries in the order of their ids."""


class RedisOnPaper:
    """Keys, scripts and a clock.

    Args:
        now_us: Unix time in microseconds, whenever it is asked for.
    """

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._values: dict[bytes, Any] = {}
        self._ends_ms: dict[bytes, int] = {}
        self._functions: dict[bytes, Any] = {}
        self._last_entry = (0, 0)
        self._commands: dict[bytes, Callable[..., Reply]] = {}
        self.writes = 0
        """Commands that may have changed something; goes up only."""
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._array = self._lua.table_from
        self._lua.eval(_SET_UP)(self._call, self._sha1, self._decode, self._register)

    # --- Clients ---------------------------------------------------------------------

    def command(self, *words: str | bytes | int) -> Reply:
        """Run one command."""
        name, *rest = (_word(word) for word in words)
        return self._run(name.upper(), rest)

    def load(self, source: str) -> None:
        """Load a library of functions."""
        self._lua.execute(source.partition("\n")[2].encode())

    def call(self, function: str, key: str, *arguments: str | bytes | int) -> Reply:
        """Call a function, as FCALL does.

        Raises:
            ScriptError: It failed; what it had written stays written.
        """
        callback = self._functions[function.encode()]
        keys = self._array([key.encode()])
        argv = self._array([_word(argument) for argument in arguments])
        try:
            return _reply(callback(keys, argv))
        except lua51.LuaError as error:
            raise ScriptError(str(error)) from error

    def keys(self) -> list[str]:
        """Names of all keys that are alive, in order."""
        return sorted(key.decode() for key in list(self._values) if self._get(key) is not None)

    def forget(self, keys: Iterable[str]) -> None:
        """These keys are lost."""
        for key in keys:
            self._drop(key.encode())

    # --- Scripts ---------------------------------------------------------------------

    def _call(self, name: bytes, *words: bytes | float) -> Any:  # noqa: ANN401 - Lua's
        return self._given(self._run(name.upper(), [_word(word) for word in words]))

    def _given(self, answer: Reply) -> Any:  # noqa: ANN401 - Lua's
        if isinstance(answer, list):
            return self._array([self._given(part) for part in answer])
        return False if answer is None else answer

    def _register(self, name: bytes, callback: object) -> None:
        self._functions[name] = callback

    @staticmethod
    def _sha1(text: bytes) -> bytes:
        return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    def _decode(self, text: bytes) -> Any:  # noqa: ANN401 - JSON
        return self._as_lua(json.loads(text))

    def _as_lua(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, list):
            return self._array([self._as_lua(part) for part in value])
        if isinstance(value, dict):
            table = self._lua.table()
            for name, part in value.items():
                table[name.encode()] = self._as_lua(part)
            return table
        assert value is not None, "the wire knows no nulls"
        return value

    # --- Commands --------------------------------------------------------------------

    def _run(self, name: bytes, words: list[bytes]) -> Reply:
        run = self._commands.get(name)
        if run is None:
            run = getattr(self, f"_do_{name.decode().lower()}", None)
            if run is None:
                message = f"ERR unknown command {name.decode()}"
                raise ScriptError(message)
            self._commands[name] = run
        if name not in _READS:
            self.writes += 1
        return run(*words)

    def _get(self, key: bytes) -> Any:  # noqa: ANN401 - a value of any kind
        end_ms = self._ends_ms.get(key)
        if end_ms is not None and end_ms <= self._now_us() // 1000:
            self._drop(key)
        return self._values.get(key)

    def _drop(self, key: bytes) -> int:
        self._ends_ms.pop(key, None)
        return int(self._values.pop(key, None) is not None)

    def _of(self, key: bytes, kind: Callable[[], Any]) -> Any:  # noqa: ANN401 - of that kind
        value = self._get(key)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _do_time(self) -> list[bytes]:
        seconds, micros = divmod(self._now_us(), 1_000_000)
        return [b"%d" % seconds, b"%d" % micros]

    def _do_info(self, *_: bytes) -> bytes:
        return f"# Server\r\nredis_version:{VERSION}\r\n".encode()

    def _do_config(self, _: bytes, *names: bytes) -> list[bytes]:
        return [word for name in names for word in (name, b"noeviction")]

    def _do_exists(self, *keys: bytes) -> int:
        return sum(self._get(key) is not None for key in keys)

    def _do_del(self, *keys: bytes) -> int:
        return sum(self._drop(key) for key in keys if self._get(key) is not None)

    def _do_flushall(self, *_: bytes) -> bytes:
        self._values.clear()
        self._ends_ms.clear()
        return b"OK"

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> bytes | None:
        rest = [option.upper() for option in options]
        if b"NX" in rest and self._get(key) is not None:
            return None
        self._drop(key)
        self._values[key] = value
        if b"PX" in rest:
            self._do_pexpire(key, rest[rest.index(b"PX") + 1])
        return b"OK"

    def _do_pexpire(self, key: bytes, ttl_ms: bytes) -> int:
        if self._get(key) is None:
            return 0
        self._ends_ms[key] = self._now_us() // 1000 + int(ttl_ms)
        return 1

    def _do_pttl(self, key: bytes) -> int:
        if self._get(key) is None:
            return -2
        end_ms = self._ends_ms.get(key)
        return -1 if end_ms is None else end_ms - self._now_us() // 1000

    def _do_get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._get(key)
        return value

    def _do_mget(self, *keys: bytes) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    def _do_keys(self, _: bytes) -> list[bytes]:
        return [key.encode() for key in self.keys()]

    def _do_scan(self, _: bytes, *options: bytes) -> list[Any]:
        """All at once, as a server may that has few keys; a pattern is a beginning and a star."""
        prefix = options[options.index(b"MATCH") + 1].removesuffix(b"*")
        return [b"0", [key for key in self._do_keys(b"*") if key.startswith(prefix)]]

    # Hashes.

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        fields = self._of(key, dict)
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def _do_hget(self, key: bytes, field: bytes) -> bytes | None:
        value: bytes | None = (self._get(key) or {}).get(field)
        return value

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        known = self._get(key) or {}
        return [known.get(field) for field in fields]

    def _do_hexists(self, key: bytes, field: bytes) -> int:
        return int(field in (self._get(key) or ()))

    def _do_hlen(self, key: bytes) -> int:
        return len(self._get(key) or ())

    def _do_hkeys(self, key: bytes) -> list[bytes]:
        return list(self._get(key) or ())

    def _do_hgetall(self, key: bytes) -> list[bytes]:
        return [word for pair in (self._get(key) or {}).items() for word in pair]

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        known = self._get(key) or {}
        gone = sum(known.pop(field, None) is not None for field in fields)
        return self._unless_empty(key, gone)

    def _do_hincrby(self, key: bytes, field: bytes, change: bytes) -> int:
        fields = self._of(key, dict)
        number = int(fields.get(field, 0)) + int(change)
        fields[field] = b"%d" % number
        return number

    def _unless_empty(self, key: bytes, count: int) -> int:
        if not self._values.get(key):
            self._drop(key)
        return count

    # Sets.

    def _do_sadd(self, key: bytes, *members: bytes) -> int:
        present = self._of(key, dict)
        before = len(present)
        present.update(dict.fromkeys(members))
        return len(present) - before

    def _do_srem(self, key: bytes, *members: bytes) -> int:
        present = self._get(key)
        if present is None:
            return 0
        before = len(present)
        for member in members:
            present.pop(member, None)
        return self._unless_empty(key, before - len(present))

    def _do_scard(self, key: bytes) -> int:
        return len(self._get(key) or ())

    def _do_sismember(self, key: bytes, member: bytes) -> int:
        return int(member in (self._get(key) or ()))

    def _do_srandmember(self, key: bytes, count: bytes) -> list[bytes]:
        """The first ones, which are as random as any."""
        return list(self._get(key) or ())[: int(count)]

    # Sorted sets.

    def _do_zadd(self, key: bytes, *pairs: bytes) -> int:
        scores = self._of(key, _Scores)
        before = len(scores)
        scores.update({m: float(s) for s, m in zip(pairs[::2], pairs[1::2], strict=True)})
        scores.order = None
        return len(scores) - before

    def _do_zrem(self, key: bytes, *members: bytes) -> int:
        scores = self._get(key)
        if scores is None:
            return 0
        gone = sum(scores.pop(member, None) is not None for member in members)
        scores.order = None
        return self._unless_empty(key, gone)

    def _do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = (self._get(key) or {}).get(member)
        return None if score is None else _number(score)

    def _do_zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        ranked = self._ranked(key)
        return _listed(_slice(ranked, int(first), int(last)), options)

    def _do_zrevrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        ranked = self._ranked(key)[::-1]
        return _listed(_slice(ranked, int(first), int(last)), options)

    def _do_zrangebyscore(
        self, key: bytes, low: bytes, high: bytes, *options: bytes
    ) -> list[bytes]:
        above, below = _bound(low, exclusive_up=True), _bound(high, exclusive_up=False)
        ranked = self._ranked(key)
        found = ranked[bisect.bisect_left(ranked, above) : bisect.bisect_left(ranked, below)]
        return _listed(_limited(found, options), options)

    def _do_zrevrangebyscore(
        self, key: bytes, high: bytes, low: bytes, *options: bytes
    ) -> list[bytes]:
        above, below = _bound(low, exclusive_up=True), _bound(high, exclusive_up=False)
        ranked = self._ranked(key)
        found = ranked[bisect.bisect_left(ranked, above) : bisect.bisect_left(ranked, below)]
        return _listed(_limited(found[::-1], options), options)

    def _do_zrangebylex(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        assert high == b"+", high
        found = [
            pair
            for pair in self._ranked(key)
            if low == b"-" or pair[1] > low[1:] or (low[:1] == b"[" and pair[1] == low[1:])
        ]
        return _listed(_limited(found, options), options)

    def _do_zcount(self, key: bytes, low: bytes, high: bytes) -> int:
        return len(self._do_zrangebyscore(key, low, high))

    def _ranked(self, key: bytes) -> list[tuple[float, bytes]]:
        scores = self._get(key)
        return [] if scores is None else scores.ranked()

    _do_zcard = _do_scard

    # Streams.

    def _do_xadd(self, key: bytes, *words: bytes) -> bytes:
        rest = list(words)
        limit = None
        if rest[0].upper() == b"MAXLEN":
            limit, rest = int(rest[2]), rest[3:]
        assert rest[0] == b"*", rest
        self._last_entry = max(
            (self._now_us() // 1000, 0), (self._last_entry[0], self._last_entry[1] + 1)
        )
        entry_id = b"%d-%d" % self._last_entry
        entries = self._of(key, _Stream)
        entries.append((entry_id, rest[1:]))
        if limit is not None:
            del entries[:-limit]
        return entry_id

    def _do_xlen(self, key: bytes) -> int:
        return len(self._get(key) or ())

    def _do_xrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[Any]:
        assert last == b"+", last
        after = None if first == b"-" else _entry(first.lstrip(b"("))
        found = [
            [entry_id, fields]
            for entry_id, fields in self._get(key) or []
            if after is None or _entry(entry_id) > after
        ]
        return found[: int(options[1])] if options else found

    def _do_xrevrange(self, key: bytes, *options: bytes) -> list[Any]:
        newest = [[entry_id, fields] for entry_id, fields in reversed(self._get(key) or [])]
        return newest[: int(options[3])]


def _word(word: str | bytes | float) -> bytes:
    """A word as it travels; Lua's numbers lose their fraction of zero, as Redis prints them."""
    if isinstance(word, bytes):
        return word
    if isinstance(word, str):
        return word.encode()
    return b"%d" % word if word == int(word) else repr(word).encode()


def _number(score: float) -> bytes:
    return b"%d" % score if score.is_integer() else repr(score).encode()


def _reply(value: Any) -> Reply:  # noqa: ANN401 - Lua's
    """What a client gets of what a script returns."""
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, float):
        return int(value)
    if lua51.lua_type(value) != "table":
        return value
    if (error := value[b"err"]) is not None:
        return ScriptError(error.decode())
    items: list[Reply] = []
    while (part := value[len(items) + 1]) is not None:
        items.append(_reply(part))
    return items


def _slice(ranked: list[tuple[float, bytes]], first: int, last: int) -> list[tuple[float, bytes]]:
    stop = len(ranked) + last + 1 if last < 0 else last + 1
    return ranked[first if first >= 0 else max(0, len(ranked) + first) : max(0, stop)]


def _listed(pairs: list[tuple[float, bytes]], options: tuple[bytes, ...]) -> list[bytes]:
    if any(option.upper() == b"WITHSCORES" for option in options):
        return [word for score, member in pairs for word in (member, _number(score))]
    return [member for _, member in pairs]


def _limited(
    pairs: list[tuple[float, bytes]], options: tuple[bytes, ...]
) -> list[tuple[float, bytes]]:
    upper = [option.upper() for option in options]
    if b"LIMIT" not in upper:
        return pairs
    at = upper.index(b"LIMIT")
    skipped, count = int(options[at + 1]), int(options[at + 2])
    return pairs[skipped:] if count < 0 else pairs[skipped : skipped + count]


def _bound(text: bytes, *, exclusive_up: bool) -> tuple[float, bytes]:
    """A position in the order: just before or just after all members with that score."""
    is_open = text.startswith(b"(")
    score = float(text.lstrip(b"("))
    after = is_open if exclusive_up else not is_open
    return (score, b"\xff" * 256 if after else b"")


def _entry(entry_id: bytes) -> tuple[int, int]:
    millis, _, number = entry_id.partition(b"-")
    return int(millis), int(number or 0)


_READS: Final = frozenset(
    b"TIME INFO CONFIG EXISTS PTTL GET KEYS HGET HMGET HGETALL SCARD SISMEMBER ZSCORE "
    b"HEXISTS HLEN HKEYS MGET SRANDMEMBER XLEN "
    b"ZRANGE ZREVRANGE ZRANGEBYSCORE ZREVRANGEBYSCORE ZRANGEBYLEX ZCOUNT ZCARD XRANGE "
    b"XREVRANGE".split()
)
_SET_UP: Final = b"""
function(call, sha1, decode, register)
  redis = {
    call = call, sha1hex = sha1,
    pcall = function(...)
      local sound, answer = pcall(call, ...)
      if sound then return answer end
      return {err = tostring(answer)}
    end,
    error_reply = function(text) return {err = text} end,
    status_reply = function(text) return {ok = text} end,
    register_function = function(name, callback)
      if type(name) == 'table' then name, callback = name.function_name, name.callback end
      register(name, callback)
    end,
  }
  cjson = {decode = decode}
end
"""
