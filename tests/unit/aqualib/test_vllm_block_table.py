from __future__ import annotations

import pytest

from aqualib.engines.vllm.paging.block_table import BlockTable


def filled(capacity: int, keys: str) -> BlockTable:
    table = BlockTable(capacity)
    for key in keys:
        put = table.put(key)
        assert put is not None
    return table


def test_a_key_that_is_there_is_not_filled_again() -> None:
    table = BlockTable(4)
    first = table.put("a")
    assert first == (first[0], True) if first else False
    assert table.put("a") == (first[0], False) if first else False


def test_held_places_are_never_given_up() -> None:
    table = filled(3, "abc")
    assert table.put("d") is None
    assert table.room == 0


def test_the_least_recently_released_place_is_given_up_first() -> None:
    table = filled(3, "abc")
    (a,), (b,) = table.find("a"), table.find("b")
    table.release([b])
    table.release([a])
    assert table.put("d") == (b, True)
    assert table.find("a") == [a]
    assert table.find("b") == []


def test_a_place_is_idle_only_after_its_last_release() -> None:
    table = filled(1, "a")
    table.put("a")
    (place,) = table.find("a")
    table.release([place])
    assert table.put("b") is None
    table.release([place])
    assert table.put("b") == (place, True)


def test_a_block_that_is_not_lasting_goes_with_its_last_holder() -> None:
    table = BlockTable(2)
    put = table.put("tail", is_lasting=False)
    assert put is not None
    table.release([put[0]])
    assert len(table) == 0
    assert table.take_dropped() == [put[0]]


def test_only_the_run_from_the_first_key_on_is_found() -> None:
    table = filled(4, "abd")
    assert len(table.find("abcd")) == 2
    assert table.find("xab") == []


def test_places_taken_again_are_not_reported_as_dropped() -> None:
    table = filled(1, "a")
    table.release(table.find("a"))
    table.forget("a")
    table.put("b")
    assert table.take_dropped() == []


def test_a_lost_place_is_not_found_and_not_taken_before_its_last_release() -> None:
    table = filled(1, "a")
    (place,) = table.find("a")
    table.lose([place])
    assert table.find("a") == []
    assert table.put("b") is None, "a load that is under way would read it"
    table.release([place])
    assert table.put("b") == (place, True)


def test_a_cleared_table_finds_nothing_and_frees_what_is_held_later() -> None:
    table = filled(2, "ab")
    (a,), (b,) = table.find("a"), table.find("b")
    table.release([b])
    table.clear()
    assert table.find("a") == table.find("b") == []
    assert table.room == 1
    table.release([a])
    assert table.room == 2


def test_forgetting_spares_what_is_held() -> None:
    table = filled(2, "ab")
    table.release(table.find("b"))
    table.forget("ab")
    assert table.find("a") != []
    assert table.find("b") == []
    assert table.held_count == 1


def test_what_is_on_its_way_is_found_when_all_have_acknowledged_it() -> None:
    table = BlockTable(2)
    place = table.begin("a")
    assert place is not None
    assert table.is_known("a")
    assert table.find(["a"]) == []
    table.filled(place)
    assert table.find(["a"]) == [place]
    table.audit()


@pytest.mark.parametrize("end", ["lose", "forget", "clear", "overtake"])
def test_what_is_lost_or_forgotten_on_its_way_is_never_found(end: str) -> None:
    table = BlockTable(2)
    place = table.begin("a")
    assert place is not None
    if end == "overtake":  # The same block, paged out within a step meanwhile.
        assert table.put("a") == (1, True)
        table.release((1,))
    elif end == "clear":
        table.clear()
    else:
        table.lose([place]) if end == "lose" else table.forget(["a"])
    table.audit()
    assert table.held_count == 1, "workers still fill it"
    table.filled(place)
    table.audit()
    assert place not in table.find(["a"])
    assert table.held_count == 0
    assert table.room == 2


def test_copies_that_are_there_are_not_given_up_for_the_blocks_beside_them() -> None:
    table = filled(2, "bx")
    (b,), (x,) = table.find("b"), table.find("x")
    table.release([b])
    table.release([x])
    assert table.hold_or_begin("ab", 2) == ([x, b], [0])
    assert table.held_count == 2
    table.audit()


def test_copies_behind_a_block_without_room_are_let_go() -> None:
    table = filled(2, "bx")
    (b,) = table.find("b")
    table.release([b])
    assert table.hold_or_begin("ab", 2) == ([], [])
    assert table.put("c") == (b, True)
    table.audit()


def test_a_table_grows() -> None:
    table = BlockTable()
    assert table.put("a") is None
    table.grow(2)
    assert table.put("a") == (0, True)
    assert table.put("b") == (1, True)
    assert table.put("c") is None
