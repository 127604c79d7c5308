"""Where simulated requests come from: recorded traces, length distributions, arrival processes."""
