"""Aqua's simulator: real policies on a virtual clock, before anyone owns the GPUs."""
