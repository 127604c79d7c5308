"""What a request says of itself: its tenant, its class, its weight; and the queue it waits in.

Only what a request carries is read here, its body, its headers and vLLM's own fields. What that
makes of it in a step is decided in `scheduling`.
"""
