"""The engine's errors under the names that LangChain's own code catches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import ContextOverflowError as LangChainContextOverflowError

from kvboost_rag import ContextOverflowError


class PromptOverflowError(ContextOverflowError, LangChainContextOverflowError):
    """The prompt does not fit the model's context window; trimming middleware knows it by LangChain's error."""

    def __init__(self, error: ContextOverflowError) -> None:
        super(ContextOverflowError, self).__init__(str(error))
        self.prompt_tokens, self.window_tokens = error.prompt_tokens, error.window_tokens


@contextmanager
def translated() -> Iterator[None]:
    """Raise an overflow as an error that LangChain knows, too."""
    try:
        yield
    except PromptOverflowError:
        raise
    except ContextOverflowError as error:
        raise PromptOverflowError(error) from error
