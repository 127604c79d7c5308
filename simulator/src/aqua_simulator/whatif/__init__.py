"""What Aqua would save on a cluster: its recorded day replayed without Aqua, and with it."""
