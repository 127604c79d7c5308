"""Put memory producers next to the consumers that need them."""
