"""The papers' tables and figures, simulated again and set beside the published numbers."""
