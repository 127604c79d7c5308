"""From an instance to a plan: `solving` is the one interface.

- `portfolio`: `auto` for the min-max objectives.
- `lexicographic`, `blockwise`, `harvest`: coverage first, then balance, then few moves.
- `constrained`: pins and sets kept apart.
"""
