"""From today's plan to the next with few migrations, as moves that can be executed in order.

- `replanning`, `cycles`: which groups go where, by sampled and by listed exchanges.
- `moving`: the order, through free room where a cycle needs it.
- `replacing`: all of it: problem and plan in, plan and moves out.
"""
