"""An engine seen and steered from outside: admin API, switches, metrics, log of its steps."""
