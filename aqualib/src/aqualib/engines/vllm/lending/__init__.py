"""Lending from vLLM: what its KV cache does not need goes to others while its load is low."""
