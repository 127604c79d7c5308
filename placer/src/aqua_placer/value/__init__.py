"""What a placement is worth: how much demand servers cover, and how evenly they are loaded.

- `roster`, `prefixes`: the program over prefixes of producers, for thousands of servers at once.
- `coverage`, `balance`: the two levels of the objective.
- `matches`: the pairs of one server, with no pair that would rather have each other.
"""
