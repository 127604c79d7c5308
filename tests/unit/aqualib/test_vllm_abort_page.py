"""The page of an engine: workers look, ranks agree, and nothing is left of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from aqua_protocol import TransportError
from aqualib.engines.vllm.co_serving.abort_page import AbortPage


def test_a_worker_sees_which_step_is_to_be_aborted_and_no_other() -> None:
    with AbortPage.create() as page, AbortPage.open(page.place) as worker:
        assert not worker.is_asked(1)
        page.ask(2)
        assert [worker.is_asked(step) for step in (1, 2, 3)] == [False, True, False]


def test_the_page_has_no_name_and_ends_with_those_that_hold_it() -> None:
    page = AbortPage.create()
    place = page.place
    assert "memfd" in str(Path(place).readlink())
    worker = AbortPage.open(place)
    page.close()
    page.close()
    assert repr(page) == "AbortPage(closed)"
    # Who has opened it still may look.
    assert not worker.is_asked(1)
    worker.close()
    with pytest.raises(TransportError, match="no page that can be opened"):
        AbortPage.open(place)


def test_only_its_own_user_may_open_it() -> None:
    with AbortPage.create() as page:
        folder = Path(page.place).parent.stat()
        assert folder.st_uid == os.getuid()
        assert not stat.S_IMODE(folder.st_mode) & 0o077


def test_a_rank_whose_first_never_decides_gives_up() -> None:
    with AbortPage.create() as page:
        page.decide(1, 0)
        with pytest.raises(TransportError, match="safepoint 1 of step 1"):
            page.follow(1, 1, timeout_s=0.0)


def test_a_rank_that_is_behind_learns_of_an_abort_after_later_steps_were_decided() -> None:
    with AbortPage.create() as page:
        page.decide(1, 0)
        page.ask(1)
        assert page.decide(1, 1)
        page.decide(2, 0)
        page.ask(2)
        assert page.decide(2, 1)
        assert not page.follow(1, 0)
        assert page.follow(1, 1)
        assert not page.follow(2, 0)
        assert page.follow(2, 1)
