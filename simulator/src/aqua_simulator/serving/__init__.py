"""Online engines on a virtual clock: requests arrive, wait, run, are preempted, finish."""
