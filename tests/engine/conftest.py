"""Engine tests run in an environment of their own: `make test-engine`.

Elsewhere they are collected and left out by their marker, so a module that cannot be imported
without vLLM must not be looked at there.
"""

from importlib.util import find_spec

collect_ignore = ["aqualib/test_vllm_refusals.py"] if find_spec("vllm") is None else []
