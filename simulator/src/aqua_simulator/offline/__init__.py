"""Offline batches: a pool of requests known in advance, one engine, no user waiting for a token."""
