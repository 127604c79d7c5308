"""The demos of Aqua."""
