"""Measures what a model can lend or needs under its own workload, and labels it.

`llm`, `batch`: the two kinds of profile, from the first request to the label. Below them, each room
importing only those before it:

- `load`: what is sent: lengths, arrivals, trials, requests to an endpoint.
- `measure`: what came back: one trial recorded and summed up, the KV cache, device memory.
- `estimate`: from all trials to the sustained rate and its error; pure.
- `search`: from the estimate to the next trial; pure.
- `report`: the profile, and its forms for people, the placer, Kubernetes and the coordinator.
"""
