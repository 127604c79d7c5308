"""Online and offline requests in one engine, without vLLM's scheduler: budgets, and aborts.

`scheduler` holds the policy and says how many tokens a request may take in a step (`step_tokens`).
`attainment` judges how online requests fared, `figures` tells operators. A step of offline work is
aborted for an arrival in four moves: the arrival is heard of at once (`arrivals`), it is decided
whether it aborts the step (`step_aborts`), the workers are told by a page of shared memory
(`abort_page`), and they stop at the next place between two layers (`safepoints`).

Source: ConServe sections 4.2 to 4.5.
"""
