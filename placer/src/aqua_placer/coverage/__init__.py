"""How much demand a server's content covers, and who lends to whom within it.

- `rosters`, `groupsets`, `prefixes`: the program over prefixes of producers, by rows and by sets.
- `covering`, `lockstep`: coverage of thousands of contents at once, and bounds on all of them.
- `matching`: the pairs of one server, with no pair that would rather have each other.
- `lending`, `units`: the market's prices, and consumers bound to their producers.
"""
