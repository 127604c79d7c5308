"""Which users may be at the other end of a lease channel: one rule, kept by both ends.

A consumer's pages lie in memory that its producer reads, and a capability token serves any process
that has it. So each end asks the kernel for the other's user before it says a word (`SO_PEERCRED`,
as of connect or listen). It trusts this process's own user and root, who can read its memory
anyway, and the users that `AQUA_ALLOWED_UIDS` names.

The credentials decide. The path is looked at before them: no consumer connects where a stranger
could have put a socket, and no producer listens where a stranger could replace its own. What a
symbolic link points to does not count, since its maker may point it elsewhere a moment later.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from aqua_protocol import ConfigError
from aqua_protocol.errors import AuthError


class UntrustedPeerError(AuthError):
    """A producer, or its socket, is of a user that is not trusted; nothing was sent to it."""

    code = "untrusted_peer"
    default_remedy = "Run both ends as one user, or name the other's in AQUA_ALLOWED_UIDS."


class PeerCredentials(NamedTuple):
    """Identity of the process at the other end, vouched for by the kernel."""

    pid: int
    uid: int
    gid: int


class ProcessIdentity(NamedTuple):
    """One life of a process of a user, vouched for by the kernel; never equal to another."""

    uid: int
    pid: int
    started_ticks: int


def process_behind(credentials: PeerCredentials, pidfd: int) -> ProcessIdentity | None:
    """Tell one life of a process from all others; None if it has ended, or cannot be seen.

    Numbers of processes come back, with another start time. `pidfd` is that of the connection.
    """
    try:
        stat = Path(f"/proc/{credentials.pid}/stat").read_bytes()
    except OSError:
        return None  # In another PID namespace, for one.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return None  # What was read may be of a successor.
    # The program's name, in parentheses, may hold anything; the start is the 20th field after it.
    started_ticks = int(stat.rpartition(b")")[2].split()[19])
    return ProcessIdentity(credentials.uid, credentials.pid, started_ticks)


def credentials_of(sock: socket.socket) -> PeerCredentials:
    """Who is at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    return PeerCredentials(*struct.unpack("iII", raw))


def trusted_uids(allowed_uids: Iterable[int] | None = None) -> frozenset[int]:
    """This process's user, root, and the users that are allowed by name."""
    return frozenset({os.geteuid(), 0, *(allowed_uids or ())})


def require_trusted(
    uid: int, trusted: frozenset[int], what: str, refusal: type[AuthError] = UntrustedPeerError
) -> None:
    """Refuse, by an error of the kind `refusal`, what is of a user that is not `trusted`."""
    if uid not in trusted:
        raise refusal(f"{what} is of user {uid}", remedy=UntrustedPeerError.default_remedy, uid=uid)


def require_safe_directory(directory: Path, trusted: frozenset[int]) -> None:
    """Refuse a directory in which a user that is not `trusted` can replace a socket.

    Raises:
        ConfigError: It is a link, another user's, or writable by others and not sticky.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        fault = "it is a symbolic link or no directory"
    elif status.st_uid not in trusted:
        fault = f"user {status.st_uid} owns it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        fault = "it is writable by others and not sticky"
    else:
        return
    raise ConfigError(
        f"others can replace sockets in {directory}: {fault}",
        remedy="Point AQUA_SOCKET_DIR at a directory of this user or root, and chmod go-w it.",
    )


def require_trusted_socket(path: Path, trusted: frozenset[int]) -> None:
    """Refuse a path at which a user that is not `trusted` has put a socket, or can.

    Raises:
        ConfigError: As `require_safe_directory`.
        UntrustedPeerError: What is there is no socket, or another user's.
    """
    require_safe_directory(path.parent, trusted)
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode):
        raise UntrustedPeerError(f"{path} is a symbolic link or no socket")
    require_trusted(status.st_uid, trusted, f"the socket {path}")
