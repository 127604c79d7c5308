"""Put memory producers next to the consumers that need them.

Rooms, from the ground up; each imports only those before it (`make lint` checks that):

- `problem`: instances, read and generated.
- `coverage`: what a server's content is worth.
- `programs`: linear and integer programs, which prove.
- `search`: exchanges, which find.
- `plans`: what is done with a plan.
- `solvers`: from an instance to a plan.
- `replan`: from a plan to the next one.

On top are the doors: `cli`, `service` and `benching`.
"""
