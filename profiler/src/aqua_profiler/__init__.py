"""Measures what a model can lend or needs under its own workload, and labels it."""
