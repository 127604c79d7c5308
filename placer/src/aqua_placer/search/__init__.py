"""Placements that are good, found without a proof: `bounds` says how good they could be.

- `construction`, `units`: whether groups fit, and first placements.
- `whole_servers`: from a fractional solution to one.
- `layout`, `balance`, `coverage`: pairs of servers exchange groups, for either level.
- `repair`: newcomers, pins and sets kept apart.
"""
