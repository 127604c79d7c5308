"""From all trials to the sustained rate and its error; `rate.estimate_rate` decides. Pure."""
