"""What no placement beats: every bound here holds for all placements, however a solve ended.

- `layer_cake`, `blocks`: bounds on coverage, the second tighter where weights or servers differ.
- `thresholds`, `flows`: bounds on the min-max objectives, from counts and contents, and from what
  can stand together where sizes are too many to list contents.
- `linear_program`: the interface to HiGHS.
"""
