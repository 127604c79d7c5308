"""Turns what an engine generated into lines of OpenAI's output file.

An engine answers *rows*: one prompt, one answer. A line of the batch file may want more of them
(`n`, or several prompts), which then run like any others, on whatever engine has room.

Source: OpenAI Batch API, "Retrieving the results"; the objects `chat.completion` and
`text_completion` of its API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aqua_batch.bodies import CHAT_URL
from aqua_batch.records import Entry, Rejection, RejectionCode


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What an engine made of a row.

    Attributes:
        request: The row, as the engine was given it.
        finish_reason: "stop" or "length"; "error" where `error` says why.
        output_tokens: Tokens generated.
        cached_tokens: Prompt tokens that the engine had in its prefix cache.
        error: The engine's refusal of this row.
    """

    request: int
    text: str
    finish_reason: str
    output_tokens: int
    cached_tokens: int
    error: str | None = None


def result_line(
    entry: Entry, answers: list[RowOutput], prompt_tokens: list[int], *, model: str, created_s: int
) -> dict[str, Any]:
    """A line of the output file.

    Args:
        answers: One for each part of the entry.
        prompt_tokens: Lengths of the prompts, one for each part.
        model: The name to answer with.
    """
    refusal = next((each.error for each in answers if each.error is not None), None)
    if refusal is not None:
        return Rejection(entry.line, RejectionCode.ENGINE, refusal, entry.custom_id).record()
    chat = entry.url == CHAT_URL
    # A prompt is counted once, however many answers it has.
    firsts = range(0, len(answers), entry.answer_count)
    prompt = sum(prompt_tokens[part] for part in firsts)
    output = sum(answer.output_tokens for answer in answers)
    response = {
        "status_code": 200,
        "request_id": f"req_line_{entry.line}",
        "body": {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{entry.custom_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created_s,
            "model": model,
            "choices": [_choice(index, answer, chat=chat) for index, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {
                    "cached_tokens": sum(answers[part].cached_tokens for part in firsts)
                },
            },
        },
    }
    return {
        "id": f"batch_req_line_{entry.line}",
        "custom_id": entry.custom_id,
        "response": response,
        "error": None,
    }


def _choice(index: int, answer: RowOutput, *, chat: bool) -> dict[str, Any]:
    text = (
        {"message": {"role": "assistant", "content": answer.text}}
        if chat
        else {"text": answer.text}
    )
    return {"index": index, "finish_reason": answer.finish_reason, "logprobs": None, **text}


def output_tokens(record: Any) -> int:  # noqa: ANN401 - JSON
    """Tokens that a line of an output file says were generated; 0 where it does not."""
    try:
        return max(0, int(record["response"]["body"]["usage"]["completion_tokens"]))
    except (KeyError, TypeError, ValueError):
        return 0
