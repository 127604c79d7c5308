"""The batch demo: a batch through OpenAI's client on harvested memory and time."""
