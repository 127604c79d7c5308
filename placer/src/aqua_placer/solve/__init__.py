"""Makes a plan of an instance: `placement.place` decides, by its table of strategies.

- `minmax`: the paper's objectives. `coverage`: coverage first, then balance.
- `paper_program`: the paper's program, with three `backends`, as referee.
"""
