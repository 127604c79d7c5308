"""Engine tests run in an environment of their own: `make test-engine`.

Elsewhere they are collected and left out by their marker, so a module that cannot be imported
without vLLM must not be looked at there.
"""

from importlib.util import find_spec

NEEDS_VLLM = ["aqualib/test_vllm_interleavings.py", "aqualib/test_vllm_refusals.py"]

collect_ignore = NEEDS_VLLM if find_spec("vllm") is None else []
