"""Leads from today's plan to the next with few migrations, as moves that can be executed in order.

- `exchange_search`: which groups go where.
- `moves`: the order, through host memory where a full cluster needs it.
- `relocation`: all of it: problem and plan in, plan and moves out.
"""
