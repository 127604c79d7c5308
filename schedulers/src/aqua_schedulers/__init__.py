"""Pure scheduling policies: no torch, no engine, no clock, no I/O.

`admission` is what an offline policy and a runtime say to each other; `blendserve` blends
compute-bound and memory-bound requests; `baselines` are the orders it is measured against.
The simulator and the batch tool run the very same objects.
"""
