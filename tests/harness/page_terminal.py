"""A terminal in which a page of the documentation is typed, in a machine of its own.

The machine is a set of namespaces: its loopback has the addresses that pages name, its hosts file
their names, so commands run as they are written and no port is taken from anyone; at the end every
process of it is killed by the kernel. Its folder begins with the repository, as links, and keeps
what commands write. A server that does not end is put into the background, as in a second terminal,
until it says that it listens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from harness.bounds import until
from harness.source_tree import ROOT

NOT_LINKED: Final = frozenset({".git", "out", ".pytest_cache"})
ADDRESSES: Final = ("10.0.0.5",)
HOSTS: Final = ("coordinator", "aqua-coordinator.aqua.svc", "node-1", "node-2")
STAYS: Final = re.compile(r"^(?!.*&\s*$).*\baqua[- ](coordinator|batch|place) serve\b", re.DOTALL)
"""A server in the foreground: a page's reader leaves it there, and opens another terminal."""

SERVES: Final = re.compile(r"\b(serve|counting_server)\b.*&\s*$", re.DOTALL)
"""A server in the background."""

UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

_MACHINE: Final = r"""
ip link set lo up
for address in $ADDRESSES; do ip address add "$address/32" dev lo; done
mount --bind "$HOSTS_FILE" /etc/hosts
cd "$FOLDER"
exec bash --norc --noprofile
"""

_PLACEHOLDER: Final = re.compile(r"\b([a-z]+(?:-[a-z]+)*[_-])[0-9a-f]+\.\.\.")
"""A name that is different each time, as pages print it: `batch_5d0c...`."""


class PageTerminal:
    """One shell in one machine; a context manager that kills all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._outputs: Final = folder.with_name(f"{folder.name}-outputs")
        self._outputs.mkdir()
        for path in ROOT.iterdir():
            if path.name not in NOT_LINKED:
                (folder / path.name).symlink_to(path)
        hosts = self._outputs / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {' '.join(HOSTS)}\n")
        done, theirs = os.pipe()
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("AQUA_")
        }
        environment = inherited | {
            "ADDRESSES": " ".join(ADDRESSES),
            "FOLDER": str(folder),
            "HOSTS_FILE": str(hosts),
            "HOME": str(self._outputs),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTHONUNBUFFERED": "1",
        }
        self._bash: Final = subprocess.Popen(
            [*UNSHARE, "bash", "-euc", _MACHINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment | {"DONE": str(theirs)},
            pass_fds=[theirs],
            text=True,
        )
        os.close(theirs)
        self._done: Final = os.fdopen(done)
        self._count = 0
        self._learnt: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bash.kill()
        self._bash.wait()
        self._done.close()
        assert self._bash.stdin
        self._bash.stdin.close()

    def type(self, command: str, shown: str = "") -> str:
        """Type a command, wait for its end or its server, and compare with the output shown.

        Returns:
            What it wrote so far.
        """
        for placeholder, value in self._learnt.items():
            command = command.replace(placeholder, value)
        output = self.start(command)
        if STAYS.match(command):
            return self._wait_for(output, "listening")
        status = self._done.readline().strip()
        if SERVES.search(command):
            self._wait_for(output, "listening")
        text = output.read_text()
        assert status == "0", f"{command}\nended with {status or 'the machine'}:\n{text}"
        self._compare(command, text, shown)
        return text

    def start(self, command: str) -> Path:
        """Type a command; return the file that its output goes to."""
        self._count += 1
        step = self._outputs / f"step-{self._count}"
        output = self._outputs / f"output-{self._count}"
        step.write_text(command + "\n")
        output.touch()
        assert self._bash.stdin
        if STAYS.match(command):
            line = f"{{ . {step}; }} > {output} 2>&1 < /dev/null &\n"
        else:
            line = f". {step} > {output} 2>&1 < /dev/null; echo $? >&$DONE\n"
        self._bash.stdin.write(line)
        self._bash.stdin.flush()
        return output

    def _wait_for(self, output: Path, words: str) -> str:
        until(lambda: words in output.read_text(), lambda: f"{words!r} in\n{output.read_text()}")
        return output.read_text()

    def _compare(self, command: str, text: str, shown: str) -> None:
        """Find each line that the page shows, in order: numbers may differ, `...` is anything."""
        lines = text.splitlines()
        for expected in filter(None, map(str.strip, shown.splitlines())):
            if expected == "...":
                continue
            for placeholder in _PLACEHOLDER.finditer(expected):
                value = re.search(rf"\b{placeholder[1]}\w+", text)
                assert value, f"{command}\nshould print {placeholder[0]}, printed:\n{text}"
                self._learnt[placeholder[0]] = value[0]
                expected = expected.replace(placeholder[0], value[0])  # noqa: PLW2901 - now known
            pattern = shape_of(expected)
            while lines and not pattern.search(lines[0]):
                lines.pop(0)
            assert lines, f"{command}\nshould print {expected!r}, printed:\n{text}"


def shape_of(line: str) -> re.Pattern[str]:
    """Compile a printed line so that other numbers, spaces and what `...` stands for fit."""
    pieces = re.split(r"(\.\.\.|\d[\d.,]*(?:e[+-]?\d+)?|\s+)", line)
    kinds = {"...": ".*"}
    return re.compile(
        "".join(
            kinds.get(piece, r"\s+" if piece.isspace() else r"[\d.,e+-]+")
            if index % 2
            else re.escape(piece)
            for index, piece in enumerate(pieces)
        )
    )
