"""Which KV blocks are in the store, under which number, and which requests need them.

A paged block has a *key*: the hash of its tokens and of all before them where prefixes are shared,
or (request, index) where they are not. Full blocks never change, so a block that is in the store
once need not be paged out again: a request that comes back keeps its copies there, and its next
preemption only pages what it has computed since. A partial last block is its request's alone.

Every place is in one of three states:

    free ── put ──> held (by one or more requests) ── last release ──> idle ──> free
                      ^──────────────── hold ────────────────────────────┘

A block that is not `lasting` goes from held to free. One whose bytes are still on their way
(`begin`) is held, and found by its key once all workers have acknowledged them (`filled`).

Held places are safe. Idle ones are a cache, of finished prefixes and of clean copies alike, and
are given up first, the least recently used at the head. `room` counts both free and idle. Where the
key is *pinned*, a place that no request holds is not idle but kept, until it is unpinned.

Owned by the scheduler's thread. Contents are the workers' affair: what the table says is there may
turn out lost (`lose`), and then the requests that relied on it are computed again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    key: Hashable
    holders: int
    is_lasting: bool


class _Followed(dict[Hashable, int]):
    """Places by key, and which keys have come or gone."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[Hashable] = set()

    def __setitem__(self, key: Hashable, place: int) -> None:
        self.changed.add(key)
        super().__setitem__(key, place)

    def __delitem__(self, key: Hashable) -> None:
        self.changed.add(key)
        super().__delitem__(key)


class BlockTable:
    """Places for `capacity_blocks` paged blocks."""

    def __init__(self, capacity_blocks: int = 0) -> None:
        self.capacity_blocks = 0
        self._unused: list[int] = []
        self._filling: dict[Hashable, int] = {}
        self._places: dict[int, _Place] = {}
        self._by_key: dict[Hashable, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pinned: Counter[Hashable] = Counter()
        # Pinned, and held by no request.
        self._kept: set[int] = set()
        self._dropped: set[int] = set()
        self.grow(capacity_blocks)

    def grow(self, capacity_blocks: int) -> None:
        """Have this many places from now on; never fewer than before."""
        assert capacity_blocks >= self.capacity_blocks, capacity_blocks
        self._unused[:0] = range(capacity_blocks - 1, self.capacity_blocks - 1, -1)
        self.capacity_blocks = capacity_blocks

    def follow(self) -> set[Hashable]:
        """Keys that come or go from now on, for the caller to empty; of an empty table only."""
        assert not self._by_key, len(self._by_key)
        followed = self._by_key = _Followed()
        return followed.changed

    def __len__(self) -> int:
        return len(self._places)

    @property
    def room(self) -> int:
        """Blocks that could be put now, at the price of idle ones."""
        return len(self._unused) + len(self._idle)

    @property
    def unused(self) -> int:
        """Blocks that could be put now and displace none."""
        return len(self._unused)

    @property
    def held_count(self) -> int:
        """Blocks that some request needs."""
        return len(self._places) - len(self._idle) - len(self._kept)

    @property
    def pinned_count(self) -> int:
        """Keys that are pinned, whether their blocks are there or not."""
        return len(self._pinned)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Places of the longest run of `keys`, from the first, that is there."""
        found = []
        for key in keys:
            place = self._by_key.get(key)
            if place is None:
                break
            found.append(place)
        return found

    def hold(self, places: Iterable[int]) -> None:
        """Keep these from being given up until they are released as often."""
        for place in places:
            entry = self._places[place]
            if not entry.holders:
                self._idle.pop(place, None)
                self._kept.discard(place)
            entry.holders += 1

    def release(self, places: Iterable[int]) -> None:
        """Undo one `hold` or `put` of each."""
        for place in places:
            entry = self._places[place]
            entry.holders -= 1
            assert entry.holders >= 0, (place, entry)
            if entry.holders:
                continue
            if not entry.is_lasting:
                self._free(place)
            elif entry.key in self._pinned:
                self._kept.add(place)
            else:
                self._idle[place] = None

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Keep blocks of these keys, now or when they come, until they are unpinned as often."""
        for key in keys:
            self._pinned[key] += 1
            place = self._by_key.get(key)
            if place is not None and place in self._idle:
                del self._idle[place]
                self._kept.add(place)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Undo one `pin` of each."""
        for key in keys:
            self._pinned[key] -= 1
            if self._pinned[key]:
                continue
            del self._pinned[key]
            place = self._by_key.get(key)
            if place is not None and place in self._kept:
                self._kept.remove(place)
                self._idle[place] = None

    def present(self, keys: Iterable[Hashable]) -> list[int]:
        """Places of those of `keys` that are there."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def put(self, key: Hashable, *, is_lasting: bool = True) -> tuple[int, bool] | None:
        """Find or take a place for `key`, and hold it; None without room.

        Says whether it has to be filled. A `lasting` one is worth keeping when no request holds it.
        """
        place = self._by_key.get(key)
        if place is not None:
            self.hold((place,))
            return place, False
        place = self._take(key, 1, is_lasting=is_lasting)
        if place is None:
            return None
        self._by_key[key] = place
        return place, True

    def is_known(self, key: Hashable) -> bool:
        """Whether the block is there or on its way."""
        return key in self._by_key or key in self._filling

    def begin(self, key: Hashable) -> int | None:
        """Take and hold a place for `key`; None without room. It can be found once `filled`."""
        assert not self.is_known(key), key
        place = self._take(key, 1, is_lasting=True)
        if place is not None:
            self._filling[key] = place
        return place

    def hold_or_begin(self, keys: Sequence[Hashable], lasting: int) -> tuple[list[int], list[int]]:
        """Hold the places of `keys`, from the first on, as many as there is room for.

        A block that is neither there nor on its way gets a place that is held twice, until it is
        `filled` and by the caller. The first `lasting` of `keys` can be found then; what is behind
        them is for those that hold it. Returns the places, and the indices of those that are new.
        """
        filling = self._filling
        known = list(map(self._by_key.get, keys))
        if not filling.keys().isdisjoint(keys):
            pairs = zip(keys, known, strict=True)
            known = [filling.get(key) if place is None else place for key, place in pairs]
        # First of all, or its own copies would be what the others are given room by.
        held = [place for place in known if place is not None]
        self.hold(held)
        if len(held) == len(keys):
            return held, []
        places: list[int] = []
        begun: list[int] = []
        for at, found in enumerate(known):
            place = found
            if place is None:
                place = self._take(keys[at], 2, is_lasting=at < lasting)
                if place is None:
                    self.release(held[at - len(begun) :])
                    break
                if at < lasting:
                    filling[keys[at]] = place
                begun.append(at)
            places.append(place)
        return places, begun

    def filled(self, place: int) -> None:
        """What began is acknowledged, and is worth keeping unless it was lost or forgotten."""
        entry = self._places[place]
        if self._filling.get(entry.key) == place:
            del self._filling[entry.key]
        if entry.is_lasting and entry.key not in self._by_key:
            self._by_key[entry.key] = place
        else:
            entry.is_lasting = False
        self.release((place,))

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Free idle places of `keys`: no request will ask for them again."""
        for key in keys:
            place = self._by_key.get(key)
            if place is not None and not self._places[place].holders:
                self._free(place)
            filling = self._filling.pop(key, None)
            if filling is not None:
                self._places[filling].is_lasting = False

    def lose(self, places: Iterable[int]) -> None:
        """These hold nothing: `find` does not find them any more.

        One that is held is not taken again before its last release, because a load that is under
        way would then read what is not its own.
        """
        for place in places:
            entry = self._places.get(place)
            if entry is None:
                continue
            if not entry.holders:
                self._free(place)
            else:
                for found in (self._by_key, self._filling):
                    if found.get(entry.key) == place:
                        del found[entry.key]
                        entry.is_lasting = False

    def keep_held(self) -> None:
        """Free what no request needs, pinned or not, and the rest as it is released."""
        for place in (*self._idle, *self._kept):
            self._free(place)
        for entry in self._places.values():
            entry.is_lasting = False

    def clear(self) -> None:
        """Forget all keys; what is held stays so until its last release."""
        self.lose(list(self._places))

    def take_dropped(self) -> list[int]:
        """Places freed since the last call and not taken again: the workers may free theirs."""
        dropped, self._dropped = sorted(self._dropped), set()
        return dropped

    def audit(self) -> None:
        """Check what always holds; for tests, O(n)."""
        held = {place for place, entry in self._places.items() if entry.holders}
        found = set(self._by_key.values())
        assert self.held_count == len(held), (self.held_count, held)
        assert len(self._places) + len(self._unused) == self.capacity_blocks, self._unused
        assert found <= self._places.keys(), found - self._places.keys()
        assert self._places.keys() - found <= held, "what is neither found nor held is free"
        assert set(self._filling.values()) <= held - found, self._filling
        kept = {place for place in self._places if self._places[place].key in self._pinned} - held
        assert self._kept == kept, (self._kept, kept)

    def _take(self, key: Hashable, holders: int, *, is_lasting: bool) -> int | None:
        if self._unused:
            place = self._unused.pop()
            self._dropped.discard(place)
            self._places[place] = _Place(key, holders, is_lasting)
        elif self._idle:
            place, _ = self._idle.popitem(last=False)
            entry = self._places[place] = self._places.pop(place)
            del self._by_key[entry.key]
            entry.key, entry.holders, entry.is_lasting = key, holders, is_lasting
        else:
            return None
        return place

    def _free(self, place: int) -> None:
        entry = self._places.pop(place)
        if self._by_key.get(entry.key) == place:
            del self._by_key[entry.key]
        self._idle.pop(place, None)
        self._kept.discard(place)
        self._unused.append(place)
        self._dropped.add(place)
