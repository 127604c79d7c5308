"""The leases of one consumer: from the first wish to the last slab returned.

- `demand`: when to ask the coordinator for memory and when to give some back, as pure decisions.
- `handshake`: from a grant on paper to slabs in this process's address space.
- `attachment`: one lease in use: a channel to a producer, and the slabs that it lent.
- `events`: the thread that listens to every producer.
- `client`: all of it together, and the two threads that talk to the coordinator.
"""
