"""From today's plan to the next with few migrations, as moves that can be executed in order.

- `fewest`: the fewest migrations and their proof, where models come in few types.
- `gains`, `cycles`: cycles of replacements out of a table of what each one gains.
- `replanning`: which groups go where, by these and by sampled exchanges.
- `moving`: the order, through free room where a cycle needs it.
- `replacing`: all of it: problem and plan in, plan and moves out.
"""
