"""What `AquaScheduler` adds to vLLM's scheduler, one class for each thing that it adds.

vLLM's Scheduler
LendingScheduler       blocks of the KV cache lent, and taken back       (`lending`)
CoServingScheduler     steps that online and offline requests share
AbortingScheduler      steps that are aborted for an arrival
EvictionScheduler      requests that an operator evicts
AquaScheduler          fair time slices                                  (`vllm.scheduler`)
"""
