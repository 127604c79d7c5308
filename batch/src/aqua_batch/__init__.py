"""OpenAI batch files on harvested capacity: order them, run them on stock vLLM, resume them."""
