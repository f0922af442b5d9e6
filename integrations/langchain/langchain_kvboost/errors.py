"""The engine's errors under the names that LangChain's own code catches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.exceptions import ContextOverflowError as LangChainContextOverflowError

from kvboost_rag import ContextOverflowError


class PromptOverflowError(ContextOverflowError, LangChainContextOverflowError):
    """The prompt does not fit the model's context window; trimming middleware knows it by LangChain's error."""

    def __init__(self, error: ContextOverflowError) -> None:
        super(ContextOverflowError, self).__init__(str(error))
        self.prompt_tokens, self.window_tokens = error.prompt_tokens, error.window_tokens

    def __reduce__(self) -> tuple[Any, ...]:  # by default, the message alone would be given to the constructor
        return _restored, (self.prompt_tokens, self.window_tokens, self.args)


def _restored(prompt_tokens: int, window_tokens: int, args: tuple[Any, ...]) -> PromptOverflowError:
    error = PromptOverflowError(ContextOverflowError(prompt_tokens, window_tokens))
    error.args = args
    return error


@contextmanager
def translated() -> Iterator[None]:
    """Raise an overflow as an error that LangChain knows, too."""
    try:
        yield
    except PromptOverflowError:
        raise
    except ContextOverflowError as error:
        raise PromptOverflowError(error) from error
