"""Plans, once they are made: written, checked, explained, drawn and handed to the coordinator.

None of it knows how a plan was found; `checking` trusts no solver.
"""
