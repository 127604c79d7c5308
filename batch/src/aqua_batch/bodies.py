"""What the body of a request asks for: prompts, numbers of answers, lengths, sampling.

Two questions are kept apart. *Is it a request?* (`ChatBody`, `CompletionBody`): then it can be
tokenised, planned and written in another order, whatever tool runs it afterwards. *Can we run it?*
(`run_problem`): what asks for more than text from text (tools, images, log probabilities, ...) is
refused by name rather than answered with the wish left out, and every number that reaches the
engine is checked first, because an engine that trips over one request takes all others with it.

Source: OpenAI API reference, "Create chat completion" and "Create completion".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
URLS: Final = f"{CHAT_URL}, {COMPLETION_URL}"

MOST_ANSWERS: Final = 128
"""Fixed by OpenAI: the bound of `n`."""

MOST_PROMPTS: Final = 2048
"""Fixed by OpenAI: the bound of prompts in one body."""

COMPLETION_DEFAULT_TOKENS: Final = 16
"""Fixed by OpenAI: `max_tokens` of a completion that names none; a chat without one is bounded by
the model."""

LARGEST_TOKEN: Final = 2**31 - 1
"""Fixed: token ids are 32-bit integers."""

ELSEWHERE: Final = "`aqua batch serve` passes it to an engine"
"""Fixed: what to do with a request that asks for more than text from text."""

CHOICES: Final = {CHAT_URL, COMPLETION_URL, "str", "list"}
"""What pydantic puts into the place of an error where a type is chosen."""

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_TOKEN)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Several = Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


class _Strict(BaseModel):
    """Takes JSON's types as they are: no text for a number, no truth value for one."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Body(_Strict):
    max_completion_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None


def _in_one_sentence(prompt: object, check: ValidatorFunctionWrapHandler) -> object:
    """Say what a prompt may be, where pydantic would say it of each choice."""
    try:
        return check(prompt)
    except ValidationError:
        raise ValueError(
            f"must be a non-empty text, token ids, or a list of up to {MOST_PROMPTS} of either"
        ) from None


class CompletionBody(_Body):
    """A completion: prompts are texts or token ids, one or several."""

    prompt: Annotated[Text | Tokens | Several, WrapValidator(_in_one_sentence)]


class _Part(_Strict):
    type: str
    text: str | None = Field(None, validate_default=True)

    @field_validator("text")
    @classmethod
    def _is_there(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("type") == "text":
            raise ValueError("a part of text must have one")
        return text


class _Message(_Strict):
    role: str
    content: (
        Annotated[
            Annotated[str, Tag("str")] | Annotated[list[_Part], Tag("list")],
            Discriminator(
                lambda content: type(content).__name__,
                custom_error_type="content",
                custom_error_message="must be text or a list of parts",
            ),
        ]
        | None
    ) = None


class ChatBody(_Body):
    """A chat: contents of messages are texts or lists of parts, of text or not."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Any] | None = None


class Problem(NamedTuple):
    """What is wrong with a body.

    Attributes:
        param: The field, written as a path.
    """

    message: str
    param: str


def problem_of(error: ValidationError) -> Problem:
    """The first thing that was found wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    names = [name for name in first["loc"] if name not in CHOICES]
    path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    path = path.removeprefix(".")
    return Problem(f"{path}: {first['msg'].removeprefix('Value error, ')}", path)


def prompt_parts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion, each a text or token ids.

    OpenAI takes a text, a list of texts, a list of token ids, or a list of such lists.
    """
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def output_limit(url: str, body: Mapping[str, Any]) -> int | None:
    """Most tokens that an answer may have; None where only the model bounds it."""
    limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit or (COMPLETION_DEFAULT_TOKENS if url == COMPLETION_URL else None)


def known_length(url: str, body: Mapping[str, Any]) -> int | None:
    """Tokens that an answer will have, if the request fixes them.

    vLLM's `ignore_eos`, and `min_tokens` at the limit, do: that is how media tokens are asked for.
    """
    limit = output_limit(url, body)
    is_fixed = body.get("ignore_eos") is True or body.get("min_tokens") == limit
    return limit if is_fixed else None


# --- Can we run it? ----------------------------------------------------------------------

TokenName = Annotated[str, Field(pattern=r"^[0-9]+$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _SamplingFields(_Strict):
    """Fields that vLLM's SamplingParams knows under the same name, and what it takes for them."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[TokenName, Bias] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_TOKEN)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e3)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_TOKEN)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


def run_problem(url: str, body: Mapping[str, Any]) -> Problem | None:
    """Why a well-formed body cannot be run as it asks, or None."""
    for name, is_wanted in _NOT_RUN.items():
        value = body.get(name)
        if value is not None and is_wanted(value):
            return Problem(f"{name} is not supported here; {ELSEWHERE}", f"body.{name}")
    if url == CHAT_URL:
        for index, message in enumerate(body["messages"]):
            content = message.get("content")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                if part["type"] != "text":
                    return Problem(
                        f"{part['type']} parts are not supported here, only text; {ELSEWHERE}",
                        f"body.messages[{index}].content[{place}]",
                    )
    try:
        _SamplingFields.model_validate(body)
    except ValidationError as error:
        message, param = problem_of(error)
        return Problem(message, f"body.{param}")
    if (body.get("min_tokens") or 0) > (output_limit(url, body) or LARGEST_TOKEN):
        return Problem("min_tokens exceeds max_tokens", "body.min_tokens")
    return None


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a checked body that are set, under vLLM's names."""
    given = {n: body[n] for n in _SamplingFields.model_fields if body.get(n) is not None}
    if "logit_bias" in given:
        # JSON has no integer keys.
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


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
