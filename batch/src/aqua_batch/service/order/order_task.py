"""What a service asks the program that orders an input (`input_order`), as JSON on its stdin.

A module of its own, since the service loads nothing that the program computes with.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from aqua_batch.policies import Policy


class OrderTask(BaseModel):
    """An input to be ordered.

    Attributes:
        files: URL of the store.
        input_key: Of the input in it.
        earlier: Inputs and outputs of batches that have ended, which tell how long answers are.
        tokenizer: As `aqua_batch.tokens.load_tokenizer` knows it.
        model: Folder or config.json of the model; None for Llama-3.1-8B.
    """

    files: str
    input_key: str
    endpoint: str
    policy: Policy
    tokenizer: str
    gpu: str
    model: Path | None
    earlier: list[tuple[str, str]] = []
