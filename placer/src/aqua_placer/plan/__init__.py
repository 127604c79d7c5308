"""Plans: assembled from servers, written, verified, explained, drawn, handed to the coordinator.

Only `assembly` knows what solvers return; `verification` trusts none of them.
"""
