"""`python -m aqualib.engines.vllm.contract`: try the contract on a vLLM, and opt in to it."""

from aqualib.engines.vllm.contract.check import main

raise SystemExit(main())
