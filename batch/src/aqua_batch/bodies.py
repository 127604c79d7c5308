"""What the body of a request asks for: prompts, numbers of answers, lengths, sampling.

Two questions are kept apart. *Is it a request?* (`form_problem`): then it can be tokenised, planned
and written in another order, whatever tool runs it afterwards. *Can we run it?* (`run_problem`):
what asks for more than text from text (tools, images, log probabilities, ...) is refused by name
rather than answered with the wish left out, and every number that reaches the engine is checked
first, because an engine that trips over one request takes all others with it.

Source: OpenAI API reference, "Create chat completion" and "Create completion".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
URLS: Final = (CHAT_URL, COMPLETION_URL)

MOST_ANSWERS: Final = 128
"""Fixed by OpenAI: the bound of `n`."""

MOST_PROMPTS: Final = 2048
"""Fixed by OpenAI: the bound of prompts in one body."""

COMPLETION_DEFAULT_TOKENS: Final = 16
"""Fixed by OpenAI: `max_tokens` of a completion that names none; a chat without one is bounded by
the model."""

LARGEST_TOKEN: Final = 2**31 - 1
"""Fixed: token ids are 32-bit integers."""


class Problem(NamedTuple):
    """What is wrong with a body.

    Attributes:
        param: The field, written as a path.
    """

    message: str
    param: str


def answer_count(body: Mapping[str, Any]) -> int:
    """Answers that a request wants to each of its prompts."""
    count = body.get("n")
    return 1 if count is None else int(count)


def prompt_parts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts of a completion, each a text or token ids.

    OpenAI takes a text, a list of texts, a list of token ids, or a list of such lists.
    """
    prompt = body["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def output_limit(url: str, body: Mapping[str, Any]) -> int | None:
    """Most tokens that an answer may have; None where only the model bounds it."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if limit is not None:
            return int(limit)
    return COMPLETION_DEFAULT_TOKENS if url == COMPLETION_URL else None


def known_length(url: str, body: Mapping[str, Any]) -> int | None:
    """Tokens that an answer will have, if the request fixes them.

    vLLM's `ignore_eos`, and `min_tokens` at the limit, do: that is how media tokens are asked for.
    """
    limit = output_limit(url, body)
    if limit is not None and (body.get("ignore_eos") is True or body.get("min_tokens") == limit):
        return limit
    return None


def form_problem(url: str, body: Mapping[str, Any]) -> Problem | None:
    """Why a body is no request of that URL, or None."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if limit is not None and not (_is_int(limit) and limit >= 1):
            return Problem(f"{name} must be a positive integer", f"body.{name}")
    count = body.get("n")
    if count is not None and not (_is_int(count) and 1 <= count <= MOST_ANSWERS):
        return Problem(f"n must be an integer from 1 to {MOST_ANSWERS}", "body.n")
    if url == CHAT_URL:
        return _messages_problem(body.get("messages"))
    return _prompt_problem(body.get("prompt"))


def _prompt_problem(prompt: object) -> Problem | None:
    if isinstance(prompt, str) and prompt:
        return None
    if isinstance(prompt, list) and prompt:
        if all(_is_int(token) for token in prompt):
            return _tokens_problem(prompt)
        if len(prompt) > MOST_PROMPTS:
            return Problem(f"more than {MOST_PROMPTS} prompts in one request", "body.prompt")
        if all(isinstance(each, str) and each for each in prompt):
            return None
        if all(isinstance(each, list) and each for each in prompt) and all(
            _is_int(token) for each in prompt for token in each
        ):
            problems = (_tokens_problem(each) for each in prompt)
            return next((each for each in problems if each is not None), None)
    return Problem(
        "prompt must be a non-empty text, a list of texts, token ids, or a list of such lists",
        "body.prompt",
    )


def _tokens_problem(tokens: list[int]) -> Problem | None:
    if min(tokens) < 0 or max(tokens) > LARGEST_TOKEN:
        return Problem(f"token ids are integers from 0 to {LARGEST_TOKEN}", "body.prompt")
    return None


def _messages_problem(messages: object) -> Problem | None:
    if not isinstance(messages, list) or not messages:
        return Problem("messages must be a non-empty list", "body.messages")
    for index, each in enumerate(messages):
        where = f"body.messages[{index}]"
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            return Problem(f"message {index} must be an object with a role", where)
        content = each.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                    return Problem(
                        f"part {place} of message {index} must be an object with a type",
                        f"{where}.content[{place}]",
                    )
                if part["type"] == "text" and not isinstance(part.get("text"), str):
                    return Problem(
                        f"part {place} of message {index} must have a text",
                        f"{where}.content[{place}].text",
                    )
        elif not isinstance(content, str | None):
            return Problem(
                f"content of message {index} must be text or a list of parts", f"{where}.content"
            )
    return None


# --- Can we run it? ----------------------------------------------------------------------


def run_problem(url: str, body: Mapping[str, Any]) -> Problem | None:
    """Why a well-formed body cannot be run as it asks, or None."""
    for name, is_wanted in _NOT_RUN.items():
        value = body.get(name)
        if value is not None and is_wanted(value):
            return Problem(f"{name} is not supported", f"body.{name}")
    if url == CHAT_URL:
        for index, message in enumerate(body["messages"]):
            content = message.get("content")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                if part["type"] != "text":
                    return Problem(
                        f"{part['type']} parts are not supported, only text",
                        f"body.messages[{index}].content[{place}]",
                    )
    for name, (fits, wanted) in SAMPLING_FIELDS.items():
        value = body.get(name)
        if value is not None and not fits(value):
            return Problem(f"{name} must be {wanted}", f"body.{name}")
    limit, least = output_limit(url, body), body.get("min_tokens")
    if limit is not None and least is not None and least > limit:
        return Problem("min_tokens exceeds max_tokens", "body.min_tokens")
    return None


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a checked body that are set, under vLLM's names."""
    given = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    if "logit_bias" in given:
        # JSON has no integer keys.
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _between(least: float, most: float) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:  # noqa: ANN401 - JSON
        # The comparison refuses NaN and infinity too, and takes integers that no float can hold.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most

    return fits


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and least <= value <= most


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_stops(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    )


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(
        _is_int(each) and 0 <= each <= LARGEST_TOKEN for each in value
    )


def _are_biases(value: object) -> bool:
    fits = _between(-100, 100)
    return isinstance(value, dict) and all(
        isinstance(token, str) and token.isascii() and token.isdigit() and fits(bias)
        for token, bias in value.items()
    )


SAMPLING_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "frequency_penalty": (_between(-2, 2), "a number from -2 to 2"),
    "ignore_eos": (_is_bool, "true or false"),
    "logit_bias": (_are_biases, "an object of token ids and numbers from -100 to 100"),
    "min_p": (_between(0, 1), "a number from 0 to 1"),
    "min_tokens": (_whole(0, LARGEST_TOKEN), "an integer from 0"),
    "presence_penalty": (_between(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (_between(1e-6, 1e6), "a positive number"),
    "seed": (_whole(-(2**63), 2**63 - 1), "an integer of 64 bits"),
    "stop": (_are_stops, "a text or a list of texts"),
    "stop_token_ids": (_are_tokens, "a list of token ids"),
    "temperature": (_between(0, 1e3), "a number from 0"),
    "top_k": (_whole(-1, LARGEST_TOKEN), "an integer from -1"),
    "top_p": (_between(1e-9, 1), "a number above 0 and up to 1"),
}
"""Fields that vLLM's SamplingParams knows under the same name, and what it takes for them."""

_NOT_RUN: Final[Mapping[str, Callable[[Any], bool]]] = {
    "audio": bool,
    "best_of": lambda value: value != 1,
    "echo": bool,
    "functions": bool,
    "guided_choice": bool,
    "guided_grammar": bool,
    "guided_json": bool,
    "guided_regex": bool,
    "logprobs": lambda value: value is not False,
    "modalities": lambda value: value != ["text"],
    "prompt_logprobs": lambda value: value is not False,
    "response_format": lambda value: value != {"type": "text"},
    "stream": bool,
    "structured_outputs": bool,
    "suffix": bool,
    "tools": bool,
    "top_logprobs": bool,
    "use_beam_search": bool,
    "web_search_options": bool,
}
"""Fields that would change the answer and that we do not pass on, and when they do."""
