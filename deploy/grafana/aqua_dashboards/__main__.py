"""Writes the dashboards, or checks that the JSON has not drifted from its source."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from aqua_dashboards.batches import batches
from aqua_dashboards.engines import engines
from aqua_dashboards.harm_guard import harm_guard
from aqua_dashboards.overview import overview
from aqua_dashboards.reclaim_objective import reclaim_objective

FOLDER: Final = Path(__file__).resolve().parents[1]


def dashboards() -> dict[str, str]:
    """Every dashboard as JSON, by the name of its file."""
    boards = (overview, harm_guard, reclaim_objective, engines, batches)
    built = [board().build() for board in boards]
    encode = JSONEncoder(sort_keys=True, indent=2).encode
    return {f"{board.uid}.json": encode(board) + "\n" for board in built}


def stale() -> dict[Path, str]:
    """Files that are not as their source has them, with what they should be."""
    return {
        path: text
        for name, text in dashboards().items()
        if not (path := FOLDER / name).exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Write or check; the exit code says whether something had drifted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    drifted = stale()
    for path, text in drifted.items():
        if check:
            print(f"{path.name} is stale: run `make dashboards`")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return 1 if check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
