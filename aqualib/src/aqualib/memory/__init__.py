"""A consumer's store: bytes on peers while they lend, in host memory otherwise.

From the ground up; `aqualib.ranges` lies below all of them:

- `frame`, `frame_table`, `migration_policy`: state, and the choice of what moves next.
- `frame_store`, `migrator`: the same for many threads, and the threads that move.
- `transfers`: copies between an engine and frames.
"""
