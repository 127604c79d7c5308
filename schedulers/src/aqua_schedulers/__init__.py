"""Pure scheduling policies: no torch, no engine, no clock, no I/O.

`cfs` says, turn by turn, who holds memory in an engine that serves people. For offline batches,
`admission` is what a policy and a runtime say to each other, `blendserve` blends compute-bound and
memory-bound requests, and `baselines` are the orders it is measured against. The simulator, the
batch tool and the engine adapters run the very same objects.
"""
