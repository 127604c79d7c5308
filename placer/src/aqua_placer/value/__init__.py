"""What a placement is worth: how much demand servers cover, and how evenly they are loaded.

- `coverage`, `balance`: the two levels of the objective, for thousands of servers at once.
- `matches`: the pairs of one server, with no pair that would rather have each other.
"""
