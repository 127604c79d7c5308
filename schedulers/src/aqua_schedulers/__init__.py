"""Scheduling policies without torch, engine, clock or I/O: views in, decisions out.

`cfs` says, slice by slice, which requests hold memory in an engine that serves people, `conserve`
what online and offline requests compute together, step by step. For offline
batches, `admission` is what a policy and a runtime say to each other, `blendserve` blends
compute-bound and memory-bound requests, and `baselines` are the orders it is measured against. The
simulator, the batch tool and the engine adapters run the very same objects.
"""
