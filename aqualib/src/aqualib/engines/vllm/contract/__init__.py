"""The import contract with vLLM: what Aqua uses of its insides, which versions have all of it.

`surface` is the one list of what is used, `source` reads a vLLM without importing it, `check`
compares the two, and `versions` decides at start whether an engine is supported. What was found
right for a version lies in `accepted/`.
"""
