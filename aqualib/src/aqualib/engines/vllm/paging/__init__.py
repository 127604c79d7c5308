"""KV blocks in Aqua memory: written when a request loses its place, read when it has one.

The scheduler's half (`scheduler`) decides by numbers, the worker's half (`worker`) moves bytes; a
`PagingPlan` goes one way each step and a `WorkerReport` the other (`plan`). Neither imports vLLM,
so both run without an engine. The rest is what they need to know: how a model's layers keep KV
(`kv_groups`, `rows`), which block has which place (`block_table`), which prefixes stay (`pins`).

Source: Aqua sections 5 and 6.
"""
