"""The Redis of the simulation against real ones: the same commands, the same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis

from harness.redis_on_paper import RedisOnPaper
from harness.store_servers import KINDS, running_store

COMMANDS: Final = 4000
NAMES: Final = [f"name-{i}" for i in range(6)]
SCORES: Final = ["-1", "0", "1", "2", "2.5", "1700000000000001"]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    with running_store(request.param) as store:
        path = store.url.removeprefix("unix://").partition("?")[0]
        with redis.Redis(unix_socket_path=path, protocol=2) as client:
            yield client


def _commands(chance: random.Random) -> Iterator[list[str]]:
    def name() -> str:
        return chance.choice(NAMES)

    def bound() -> str:
        return chance.choice(["-inf", "+inf", "", "("]) or chance.choice(SCORES)

    for _ in range(COMMANDS):
        score, other = chance.choice(SCORES), chance.choice(SCORES)
        low = chance.choice(["-inf", score, f"({score}"])
        high = chance.choice(["+inf", other, f"({other}"])
        first, last = str(chance.randint(-4, 4)), str(chance.randint(-4, 4))
        limit = chance.choice([[], ["LIMIT", "0", "2"], ["LIMIT", "1", "-1"]])
        scores = chance.choice([[], ["WITHSCORES"]])
        hash_key, zset, values, text = "hash", "zset", "set", f"text-{name()}"
        lex = chance.choice(["-", f"({name()}", f"[{name()}"])
        yield chance.choice(
            [
                ["HSET", hash_key, name(), "a", name(), "b"],
                ["HGET", hash_key, name()],
                ["HMGET", hash_key, name(), name()],
                ["HGETALL", hash_key],
                ["HLEN", hash_key],
                ["HEXISTS", hash_key, name()],
                ["HDEL", hash_key, name(), name()],
                ["HINCRBY", "counts", name(), chance.choice(["1", "-1"])],
                ["SADD", values, name(), name()],
                ["SREM", values, name()],
                ["SCARD", values],
                ["SISMEMBER", values, name()],
                ["ZADD", zset, score, name(), other, name()],
                ["ZADD", "names", "0", name()],
                ["ZREM", zset, name(), name()],
                ["ZSCORE", zset, name()],
                ["ZCARD", zset],
                ["ZRANGE", zset, first, last, *scores],
                ["ZREVRANGE", zset, first, last, *scores],
                ["ZRANGEBYSCORE", zset, low, high, *scores, *limit],
                ["ZREVRANGEBYSCORE", zset, high, low, *scores, *limit],
                ["ZCOUNT", zset, low, high],
                ["ZRANGEBYLEX", "names", lex, "+", *limit],
                ["SET", text, name()],
                ["SET", text, name(), "NX"],
                ["SET", text, name(), "PX", "100000"],
                ["GET", text],
                ["MGET", text, "text-none"],
                ["EXISTS", text, zset],
                ["DEL", chance.choice([text, zset, values, hash_key])],
                ["PEXPIRE", chance.choice([text, zset]), "100000"],
            ]
        )


@pytest.mark.parametrize("seed", range(3))
def test_it_answers_as_a_real_one_does(server: redis.Redis, seed: int) -> None:
    server.flushall()
    paper = RedisOnPaper(lambda: 1_700_000_000_000_000)
    for words in _commands(random.Random(seed)):
        expected = _raw(server, words)
        assert paper.command(*words) == expected, words
        if words[0] == "DEL":
            assert _raw(server, ["PTTL", words[1]]) == paper.command("PTTL", words[1])
    assert sorted(paper.command("KEYS", "*")) == sorted(_raw(server, ["KEYS", "*"]))


LIBRARY: Final = """#!lua name=answers
local function answer(keys, args)
  redis.call('HSET', keys[1], 'number', 12, 'text', args[1])
  local none = redis.call('GET', 'nothing')
  local body = cjson.decode(args[2])
  local sound, fault = pcall(redis.call, 'NO_SUCH_COMMAND')
  return {none == false, 2.9, 'text', {1, {body.list[2], body.deep.flag}},
    redis.sha1hex('x'), redis.call('HGETALL', keys[1]), #body.list, sound, {nil, 1}}
end
redis.register_function('answer', answer)
redis.register_function{function_name='fails', callback=function() error('no') end}
"""


def test_its_scripts_answer_as_real_ones_do(server: redis.Redis) -> None:
    server.flushall()
    server.function_load(LIBRARY, replace=True)
    paper = RedisOnPaper(lambda: 1_700_000_000_000_000)
    paper.load(LIBRARY)
    arguments = ["word", '{"list": [1, 2, 3], "deep": {"flag": true}}']
    assert paper.call("answer", "key", *arguments) == _raw(
        server, ["FCALL", "answer", "1", "key", *arguments]
    )


def test_keys_expire_by_its_own_clock() -> None:
    now_us = 1_700_000_000_000_000
    paper = RedisOnPaper(lambda: now_us)
    paper.command("SET", "key", "value", "PX", 1000)
    now_us += 999_000
    assert paper.command("PTTL", "key") == 1
    now_us += 1_000
    assert paper.command("GET", "key") is None
    assert paper.keys() == []


def _raw(server: redis.Redis, words: list[str]) -> Any:  # noqa: ANN401 - any reply
    """The answer as it comes, without what redis-py makes of it."""
    connection = server.connection_pool.get_connection()
    try:
        connection.send_command(*words)  # type: ignore[no-untyped-call] # redis-py types it in part
        return connection.read_response()
    finally:
        server.connection_pool.release(connection)
