"""A chat answer: a completion taken apart into reasoning, content and tool calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsv4.compile.requests import Request
from dsv4.compile.sampling import Completion
from dsv4.model.encoding_tools import AnswerStream, ChatPiece


@dataclass
class ChatCompletion(Completion):
    """A Completion, and what it says. `tool_calls` are whole calls in the form of OpenAI's API; `complete` is False if the
    answer was cut off or its tool calls are malformed; `unparsed` then is what could not be read.

    `message` is the answer as a message, to be appended to the messages of the next call.
    """

    reasoning: str
    content: str
    tool_calls: list[dict]
    complete: bool
    unparsed: str
    message: dict


def run_chat(steps: Iterable, request: Request, answer: AnswerStream) -> Iterator[ChatPiece]:
    """Take the steps of a request's run and yield the pieces of its answer as they become certain."""
    taken = 0
    for _ in steps:
        for token in request.token_ids[taken:]:
            yield from answer.push(token)
        taken = len(request.token_ids)
    yield from answer.finish()


def chat_completion(request: Request, stream: AnswerStream) -> ChatCompletion:
    """The result of a request that is finished."""
    answer = stream.answer
    return ChatCompletion(**vars(request.completion()), **vars(answer), message=answer.message())
