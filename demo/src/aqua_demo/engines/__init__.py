"""What demos with a real vLLM share: engines in turns or over HTTP, people who ask, figures."""
