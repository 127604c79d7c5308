"""Estimates the sustained rate and its error from all trials: `rate.estimate_rate`. Pure."""
