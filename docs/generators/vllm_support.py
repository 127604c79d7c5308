"""The page on supported versions of vLLM, from their contracts and from what has run.

`make test-engine RECORD=1 VLLM=...` writes down in `measurements/vllm-runs.json` which modules of
the engine tests ran on which version, when and where. Nothing else makes a version "run".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from aqualib.engines.vllm.contract.check import known_contracts
from aqualib.engines.vllm.contract.versions import MINORS, OPT_IN, TRY_CONTRACT, WARNED_MINORS
from generators.navigation import DOCS

RUNS: Final = DOCS / "measurements" / "vllm-runs.json"

WARNED: Final = ", ".join(WARNED_MINORS)
NEWEST: Final = MINORS[-1]
"""What `make test-engine` runs on unless it is told another."""

HEAD: Final = f"""# Supported versions of vLLM

An engine starts on the minor versions below, and refuses any other by name. "Contract" means that
every name which Aqua uses of vLLM is in the sources of that version, and that their functions were
compared with the version before (`make test-contract`, or `python -m
aqualib.engines.vllm.contract WHEEL`: seconds, no torch). "Run" is what was recorded when the engine
tests ran on a build for CPUs (`make test-engine VLLM=0.28.0 RECORD=1`); what is not listed was not
recorded. No version was run on a GPU.

Without a warning starts vLLM {", ".join(MINORS)}: at least the tests of schedulers, paging (with
its prefix tier) and lending pass there, by the records below or, on {NEWEST}, because all engine
tests run on it before a change lands. With a warning: {WARNED}.

Models of several groups of KV blocks are on record for {NEWEST} alone. On a CPU with AMX earlier
versions do not run all models of these tests in float32 by themselves: not Granite 4 before 0.32,
nor gpt-oss before 0.31. On such a CPU 0.29 and 0.31 passed the tests of all the others; on 0.28
those of Gemma 3 alone passed.

An engine compares the functions that it runs with the nearest of these versions as it starts. Where
some read differently, in a patch release or a fork, it names them in its log, and starts.

To try another version, run

```console
$ {TRY_CONTRACT}
```

It names what is missing, which ends it, and what reads differently, which is for you to judge. With
`{OPT_IN}=vllm-contract.json` that one version then starts, with a warning.
"""


def support_page(notice: str) -> str:
    """The page, below `notice`."""
    runs: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}
    known = list(known_contracts().values())
    lines = [notice, HEAD, "| version | contract | engine tests that ran |", "|---|---|---|"]
    lines += [
        f"| {each.version} | holds, {len(each.fingerprints)} functions | "
        f"{_ran(each.version, runs.get(each.version, {}))} |"
        for each in known
    ]
    lines += ["", "## What ran", ""]
    versions = [each.version for each in known if each.version in runs]
    lines.append(f"| module of `tests/engine` | {' | '.join(versions)} |")
    lines.append("|---" * (1 + len(versions)) + "|")
    for module in sorted({module for ran in runs.values() for module in ran}):
        cells = [_outcomes(runs[version].get(module, {})) for version in versions]
        lines.append(f"| `{module.removeprefix('tests/engine/')}` | {' | '.join(cells)} |")
    lines += ["", "Where, when, and CPU time by module:", ""]
    lines += [f"- {line}" for version in versions for line in _details(version, runs[version])]
    lines += ["", "## What changed from version to version", ""]
    lines.append("Functions that Aqua overrides or calls and that read differently from before.")
    for before, after in pairwise(known):
        names = ", ".join(f"`{name.partition(':')[2]}`" for name in after.changed_since(before))
        lines += ["", f"**{before.version} to {after.version}:** {names or 'none'}."]
    return "\n".join(lines) + "\n"


def _ran(version: str, modules: Mapping[str, Any]) -> str:
    if not modules:
        is_named = version.rpartition(".")[0] in MINORS
        return "none recorded" if is_named else "contract only"
    passed, failed = (
        sum(each.get(outcome, 0) for each in modules.values()) for outcome in ("passed", "failed")
    )
    return f"{passed} passed, {failed} failed, in {len(modules)} modules"


def _outcomes(ran: Mapping[str, Any]) -> str:
    counts = [f"{ran[each]} {each}" for each in ("passed", "failed", "skipped") if each in ran]
    return ", ".join(counts) or "not run"


def _details(version: str, modules: Mapping[str, Any]) -> Iterator[str]:
    runs: dict[str, list[str]] = {}
    for module, ran in sorted(modules.items()):
        used = f" {ran['cpu_s']} s" if "cpu_s" in ran else ""
        where = f"{ran['on']}, commit {ran['commit']}, {ran['machine']}"
        runs.setdefault(where, []).append(f"`{Path(module).stem}`{used}")
    for where, names in runs.items():
        yield f"{version}: {where}: {', '.join(names)}"
