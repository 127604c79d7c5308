"""The co-serving demo: people and an offline file on one vLLM."""
