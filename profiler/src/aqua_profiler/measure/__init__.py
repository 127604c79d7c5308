"""What came back: one trial recorded and summed up, the KV cache, device memory."""
