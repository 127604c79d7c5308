"""Brings requests to engines and outcomes to the rows: no more at once than an engine can take."""
