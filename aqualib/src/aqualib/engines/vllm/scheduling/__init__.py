"""What `AquaScheduler` adds to vLLM's scheduler, one class for each thing that it adds.

Each is the base of the next:

    LendingScheduler      blocks of the KV cache lent, and taken back     (`lending.scheduler`)
    CoServingScheduler    steps that online and offline requests share
    AbortingScheduler     steps that are aborted for an arrival
    EvictionScheduler     requests that an operator evicts
    AquaScheduler         fair time slices                                (`vllm.scheduler`)

The base of the first is vLLM's own `Scheduler`. What the fair policy sees of requests is in
`request_views`.
"""
