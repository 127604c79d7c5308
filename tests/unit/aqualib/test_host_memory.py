from __future__ import annotations

from pathlib import Path

import pytest

from aqualib.host_memory import host_memory_bytes

GIB = 1 << 30


def machine(root: Path, cgroup: str, **files: str) -> Path:
    """A root of which a process sees `proc/self/cgroup` and the hierarchy's files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        # A container of cgroup v2 sees its group at the root.
        ("0::/\n", {"memory_DOT_max": f"{GIB}\n"}),
        # Without a namespace the group is where the path says; the nearest limit above may be less.
        (
            "0::/pods/one/main\n",
            {
                "pods__one__main__memory_DOT_max": "max\n",
                "pods__one__memory_DOT_max": f"{GIB}\n",
                "pods__memory_DOT_max": f"{2 * GIB}\n",
            },
        ),
        # cgroup v1 in a container: the path is the host's, and the group is at the mount's root.
        (
            "11:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n",
            {"memory__memory_DOT_limit_in_bytes": f"{GIB}\n"},
        ),
        (
            "5:memory:/docker/abc\n0::/elsewhere\n",
            {
                "memory__docker__abc__memory_DOT_limit_in_bytes": f"{GIB}\n",
                "memory__memory_DOT_limit_in_bytes": "9223372036854771712\n",
            },
        ),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    assert host_memory_bytes(machine(tmp_path, cgroup, **files)) == GIB


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {}),
        ("0::/\n", {"memory_DOT_max": "max\n"}),
        ("5:memory:/\n", {"memory__memory_DOT_limit_in_bytes": "9223372036854771712\n"}),
        ("3:cpu:/x\n", {"cpu__x__memory_DOT_max": f"{GIB}\n"}),
    ],
)
def test_without_a_limit_it_is_the_machines(
    tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    whole = host_memory_bytes(tmp_path / "nothing")
    assert whole > GIB
    assert host_memory_bytes(machine(tmp_path, cgroup, **files)) == whole
