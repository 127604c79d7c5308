"""Placements that are good, found without a program: what is proven is proven elsewhere.

- `packing`, `dealing`: whether groups fit, and a first placement from how many go where.
- `exchange`, `pursuit`: pairs of servers swap groups for balance, and for coverage.
"""
