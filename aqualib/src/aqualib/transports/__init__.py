"""Ways to share memory between processes, behind one contract (`base`).

`select` gives the best one that works here. `memfd` shares host memory, `cuda_vmm` and `cuda_ipc`
share the memory of a GPU; each also makes the host memory that its data spills to.
"""

from __future__ import annotations

from aqualib.transports.base import Copier, Handle, MappedSlab, OwnedSlab, Transport
from aqualib.transports.selection import select

__all__ = ["Copier", "Handle", "MappedSlab", "OwnedSlab", "Transport", "select"]
