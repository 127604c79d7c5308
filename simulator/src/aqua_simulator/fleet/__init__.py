"""Many engines on one clock, by events: a cluster's day in minutes."""
