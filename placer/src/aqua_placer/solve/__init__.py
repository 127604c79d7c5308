"""Makes a plan of an instance: `placement.place` decides, by its table of strategies.

- `minmax`: the paper's objectives. `coverage`: coverage first, then balance. Both keep their best
  in an `incumbent`.
- `constrained`: pins and sets kept apart.
- `paper_program`: the paper's program, with three `backends`, as referee.
"""
