"""Put memory producers next to the consumers that need them.

Rooms, from the ground up; each imports only those before it (`make lint` checks that):

- `problem`: instances, read and generated.
- `value`: what a server's content is worth.
- `bounds`: what no placement beats.
- `search`: exchanges, which find. `plan`: what is done with a plan.
- `solve`: from an instance to a plan.
- `relocate`: from a plan to the next one.
- `rollout`: from a plan to what runs: values for Kubernetes, drift, steps carried out.

On top are the entrances: `cli`, `service` and `benchmark`.
"""
