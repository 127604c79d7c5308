"""Aqua's Grafana dashboards, written in Python: `make dashboards` writes them as JSON beside this.

    python -m aqua_dashboards            write
    python -m aqua_dashboards --check    compare; exit 1 and name the stale files

Each dashboard is a module with one function. What a panel shows stands in its description, for the
one who is woken by an alert; a query that joins Aqua with vLLM or DCGM is a recording rule, so that
alerts and panels cannot disagree.
"""
