"""What the demo asks: prepared questions, the user's file, or questions made from a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from langchain_core.documents import Document

from kvboost_rag import PromptError

QUESTIONS = 8
ABOUT_PYTHON = (
    "What does the global statement do?",
    "What is the secrets module used for?",
    "When is the else clause of a for loop executed?",
    "What is a lambda expression?",
    "What does Pearson's correlation coefficient measure?",
    "What does the break statement do?",
    "Which objects are considered false?",
    "What is the difference between a shallow copy and a deep copy?",
)
TOPIC_WORDS = 10


def read_questions(path: Path) -> list[str]:
    """One question per line; empty lines do not count.

    Raises:
        PromptError: the file cannot be read or holds no question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the questions in {path} cannot be read: {error}") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise PromptError(f"{path} holds no question; write one per line")
    return questions


def questions_about(passages: Sequence[Document], count: int = QUESTIONS) -> list[str]:
    """Questions about unknown documents: `count` passages spread evenly, each asked for by its first words."""
    step = max(1, len(passages) // count)
    chosen = [passages[index % len(passages)] for index in range(0, step * count, step)]
    return [f'What do the documents say about "{_topic(passage.page_content)}"?' for passage in chosen]


def _topic(text: str) -> str:
    words = re.sub(r"[#*_`>|\"]", " ", text).split()
    return " ".join(words[:TOPIC_WORDS]).rstrip(".,:;")
