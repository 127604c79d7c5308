"""Processes of other users: forked children that give up root and act once.

A child holds what it has opened until its block ends. Only root can make one, so tests that need
one are marked `needs_root`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from harness.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Say = Callable[[object], None]
    Hear = Callable[[], Any]

FRIEND: Final = 54_321
STRANGER: Final = 54_322
"""Users that no account has, one to be allowed and one not to be."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)


@contextlib.contextmanager
def other_user(uid: int, act: Callable[[Say], None]) -> Iterator[Hear]:
    """Run `act` in a child of user `uid`; what it says, as JSON, is heard line by line."""
    answers, saying = os.pipe()
    if not (pid := os.fork()):
        _live(uid, act, lambda answer: _write(saying, answer))
    os.close(saying)
    unread = b""

    def hear() -> Any:  # noqa: ANN401 - whatever the child says
        nonlocal unread
        while b"\n" not in unread:
            assert select.select([answers], [], [], HANG_S)[0], "the other user says nothing"
            part = os.read(answers, 1 << 16)
            assert part, "the other user has ended"
            unread += part
        line, _, unread = unread.partition(b"\n")
        return json.loads(line)

    try:
        yield hear
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(answers)


def _live(uid: int, act: Callable[[Say], None], say: Say) -> None:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        act(say)
        signal.pause()  # The parent ends it.
    except BaseException as error:  # noqa: BLE001 - a child must not return into pytest
        say(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _write(fd: int, answer: object) -> None:
    os.write(fd, json.dumps(answer).encode() + b"\n")
