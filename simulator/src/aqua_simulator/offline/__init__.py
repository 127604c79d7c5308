"""Offline batches: a pool of requests known in advance, one engine, nobody waiting for a token."""
