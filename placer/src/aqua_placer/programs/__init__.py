"""Linear and integer programs: what proves.

- `linear`: the one door to HiGHS.
- `contents`, `compositions`: the columns of pattern programs.
- `thresholds`, `rounding`: the min-max objectives, and from fractions to whole servers.
- `blocks`: consumers and producers as blocks, columns made as they are needed.
- `milp`: the paper's own program with three solvers, as referee.
"""
