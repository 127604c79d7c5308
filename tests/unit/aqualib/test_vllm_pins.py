"""Pinned prefixes: what they keep, what bounds them, and when they end."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from aqua_protocol import UnavailableError
from aqua_protocol.errors import QuotaExceededError, RequestInvalidError, UnknownResourceError
from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.kv_groups import BlockKeys, KvGroup, KvGroups
from aqualib.engines.vllm.paging.pins import MAX_TTL_S, PinRequest, Prefix, PrefixPinTable

BLOCK_TOKENS = 2


def prefix_of(request: PinRequest) -> Prefix:
    """Each block's key is all tokens up to its end."""
    tokens = request.prompt_token_ids
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return Prefix(len(ends) * BLOCK_TOKENS, [tuple(tokens[:end]) for end in ends])


class Tier:
    """A tier of ten blocks, of which pins may take five, and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.table = BlockTable(10)
        self.pins = PrefixPinTable(self.table, 0.5, prefix_of, self.clock)

    def clock(self) -> float:
        return self.now_s

    def pin(self, name: str, count: int, ttl_s: float | None = None) -> dict[str, object]:
        request = PinRequest(id=name, prompt_token_ids=list(range(count)), ttl_s=ttl_s)
        return self.pins.pin(request)

    def bring(self, count: int, first: int = 0) -> None:
        """A request that begins with so many tokens comes and goes."""
        tokens = list(range(first, first + count))
        for key in prefix_of(PinRequest(id="r", prompt_token_ids=tokens)).keys:
            put = self.table.put(key)
            if put is not None:
                self.table.release([put[0]])
        self.table.audit()

    def present(self, count: int) -> int:
        request = PinRequest(id="r", prompt_token_ids=[*range(count)])
        return len(self.table.present(prefix_of(request).keys))


def flood(tier: Tier) -> None:
    for first in range(100, 1000, 100):
        tier.bring(8, first)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_pinned_prefix_stays_when_others_need_its_room(*, comes_first: bool) -> None:
    tier = Tier()
    if comes_first:
        tier.bring(8)
    tier.pin("system", 8)
    tier.bring(8)
    flood(tier)
    assert tier.present(8) == 4
    assert tier.table.room == 6
    assert tier.table.held_count == 0, "no request needs it"
    tier.pins.unpin("system")
    flood(tier)
    assert tier.present(8) == 0


def test_blocks_of_two_pins_count_once_and_stay_until_both_end() -> None:
    tier = Tier()
    tier.bring(8)
    assert tier.pin("a", 8)["blocks"] == 4
    tier.pin("b", 10)
    assert tier.pins.states()["pinned_blocks"] == 5
    tier.pins.unpin("b")
    flood(tier)
    assert tier.present(8) == 4


def test_what_would_exceed_the_share_is_refused_and_changes_nothing() -> None:
    tier = Tier()
    tier.bring(8)
    tier.pin("a", 8)
    before = tier.pins.states()
    with pytest.raises(QuotaExceededError, match="5 of the tier's 10 blocks") as refused:
        tier.pin("b", 12)
    assert refused.value.details == {"limit_blocks": 5, "wanted_blocks": 6}
    assert "pinned_share" in refused.value.remedy
    with pytest.raises(QuotaExceededError):
        tier.pin("a", 12)
    assert tier.pins.states() == before
    flood(tier)
    assert tier.present(8) == 4


def test_a_pin_that_is_there_already_is_replaced() -> None:
    tier = Tier()
    tier.bring(10)
    tier.pin("a", 10)
    assert tier.pin("a", 4)["blocks"] == 2
    assert tier.pins.states()["pinned_blocks"] == 2


def test_a_pin_ends_by_itself_when_its_time_is_over() -> None:
    tier = Tier()
    tier.bring(8)
    assert tier.pin("a", 8, ttl_s=60)["ttl_s"] == 60
    tier.pin("b", 2)
    tier.now_s = 59.0
    tier.pins.expire()
    assert [each["id"] for each in tier.pins.states()["pins"]] == ["a", "b"]
    tier.now_s = 60.0
    tier.pins.expire()
    assert tier.pins.states() == {
        "pins": [{"id": "b", "tokens": 2, "blocks": 1, "present_blocks": 1, "ttl_s": None}],
        "pinned_blocks": 1,
        "limit_blocks": 5,
    }
    with pytest.raises(UnknownResourceError):
        tier.pins.unpin("a")
    assert tier.pins.levels() == {"pinned_prefixes": 1, "pinned_blocks": 1}


def test_paging_turned_off_drops_pinned_blocks_and_no_pin() -> None:
    tier = Tier()
    tier.bring(8)
    tier.pin("a", 8)
    tier.table.keep_held()
    assert not len(tier.table)
    assert tier.pins.states()["pinned_blocks"] == 4
    tier.bring(8)
    flood(tier)
    assert tier.present(8) == 4


def test_figures_are_told_from_the_first_pin_on() -> None:
    tier = Tier()
    assert tier.pins.levels() == {}
    tier.pin("a", 8)
    tier.pins.unpin("a")
    assert tier.pins.levels() == {"pinned_prefixes": 0, "pinned_blocks": 0}


def test_before_the_tier_has_a_size_and_without_a_block_nothing_is_pinned() -> None:
    with pytest.raises(UnavailableError) as refused:
        PrefixPinTable(BlockTable(), 0.5, prefix_of).pin(PinRequest(id="a", prompt_token_ids=[1]))
    assert refused.value.retry_after_s
    with pytest.raises(RequestInvalidError, match="1 tokens do not fill"):
        Tier().pin("a", 1)


@pytest.mark.parametrize(
    "given",
    [
        {"id": "a/b"},
        {"id": ""},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": "hello"},
        {"ttl_s": 0},
        {"ttl_s": MAX_TTL_S + 1},
        {"ttl": 5},
    ],
)
def test_what_is_no_pin_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PinRequest.model_validate({"id": "a", "prompt_token_ids": [1], **given})


def test_whatever_happens_to_a_table_pinned_blocks_are_given_up_for_none() -> None:
    keys = [bytes([at]) for at in range(12)]
    for seed in range(50):
        rng = random.Random(seed)
        table = BlockTable(6)
        pinned: list[bytes] = []
        held: list[int] = []
        filling: list[int] = []
        for _ in range(300):
            there = [key for key in pinned if table.present([key])]
            key = rng.choice(keys)
            match rng.randrange(8):
                case 0 | 1 if table.is_known(key) <= bool(table.present([key])):
                    put = table.put(key)
                    held += [] if put is None else [put[0]]
                case 2 if not table.is_known(key):
                    place = table.begin(key)
                    filling += [] if place is None else [place]
                case 3 | 4 if held:
                    table.release([held.pop(rng.randrange(len(held)))])
                case 5 if filling:
                    table.filled(filling.pop(rng.randrange(len(filling))))
                case 6 if len(set(pinned)) < 3:
                    pinned.append(key)
                    table.pin([key])
                case 7 if pinned:
                    table.unpin([pinned.pop(rng.randrange(len(pinned)))])
            table.audit()
            assert len(table.present(there)) == len(there)
            if rng.random() < 0.02:
                table.lose(table.present([key]))


def test_a_prefix_is_what_a_request_that_shares_it_would_load() -> None:
    class Asked:
        request_id = "a"
        num_tokens = 21
        block_hashes = tuple(bytes([at]) for at in range(10))

    window = KvGroup(4, lambda tokens: max(0, tokens - 5))
    groups = KvGroups([KvGroup(2), window])
    tokens, keys = BlockKeys(groups, 2).prefix(Asked())
    assert tokens == 20, "blocks of all groups end there"
    assert keys == [*Asked.block_hashes, (bytes([7]), 1), (bytes([9]), 1)]
