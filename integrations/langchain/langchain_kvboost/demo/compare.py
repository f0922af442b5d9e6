"""One question, asked twice through the same chain: with reuse and with a full prefill."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_kvboost.chat_models import ChatKVBoost

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question in one or two sentences, from the context only."),
        ("human", "Context:\n\n{context}\n\nQuestion: {question}"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and what it cost.

    Attributes:
        text: what the chain returned.
        token_ids: the answer's tokens, for comparison.
        ttft_s: call entry to first token.
        prompt_tokens, exact_tokens, approximate_tokens, repaired_tokens, computed_tokens: see `kvboost_rag.Usage`.
        fallback_reason: why reuse was not used.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    prompt_tokens: int
    exact_tokens: int
    approximate_tokens: int
    repaired_tokens: int
    computed_tokens: int
    fallback_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question with both answers."""

    question: str
    sources: tuple[str, ...]
    reused: Answer
    full: Answer

    @property
    def ratio(self) -> float:
        """TTFT of a full prefill divided by ours."""
        return self.full.ttft_s / max(self.reused.ttft_s, 1e-9)

    @property
    def same(self) -> bool:
        """Whether both answers are identical."""
        return self.reused.token_ids == self.full.token_ids

    @property
    def agreed_tokens(self) -> int:
        """Answer tokens that are equal before the first difference."""
        pairs = zip(self.reused.token_ids, self.full.token_ids, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), self.shorter_tokens)

    @property
    def shorter_tokens(self) -> int:
        """Length of the shorter answer."""
        return min(len(self.reused.token_ids), len(self.full.token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All questions together.

    Attributes:
        median_ratio: median over questions of TTFT full / ours.
        same_answers: share of questions whose greedy answers are identical.
        agreed_share: agreed tokens divided by the tokens that could agree.
    """

    questions: int
    median_ttft_s: float
    median_full_ttft_s: float
    median_ratio: float
    same_answers: float
    agreed_share: float


def summarise(rows: list[Row]) -> Summary:
    """Medians and shares over all rows; there must be one at least."""
    longest = sum(max(len(row.reused.token_ids), len(row.full.token_ids)) for row in rows)
    return Summary(
        questions=len(rows),
        median_ttft_s=median(row.reused.ttft_s for row in rows),
        median_full_ttft_s=median(row.full.ttft_s for row in rows),
        median_ratio=median(row.ratio for row in rows),
        same_answers=sum(row.same for row in rows) / len(rows),
        agreed_share=sum(row.agreed_tokens for row in rows) / max(longest, 1),
    )


def reorder(documents: list[Document]) -> list[Document]:
    """The documents in an order of their own for each set: what happens when rankings change from call to call."""
    order = list(documents)
    random.Random("\n".join(document.page_content for document in documents)).shuffle(order)
    return order


def as_text(documents: list[Document]) -> str:
    """The documents as the prompt shows them."""
    return "\n\n".join(document.page_content for document in documents)


def build_chain(retriever: BaseRetriever, chat: Runnable[Any, Any]) -> Runnable[str, str]:
    """The usual chain: retriever, prompt template, chat model, string parser."""
    inputs: dict[str, Any] = {"context": retriever | reorder | as_text, "question": RunnablePassthrough()}
    return inputs | PROMPT | chat | StrOutputParser()


class Comparison:
    """Asks questions through two chains that differ in nothing but reuse.

    Args:
        retriever: finds the documents of a question.
        chat: the chat model; its engine holds the warmed documents.
    """

    def __init__(self, retriever: BaseRetriever, chat: ChatKVBoost) -> None:
        self._retriever = retriever
        self._tokenizer = chat.get_engine().tokenizer
        self._reusing = build_chain(retriever, chat)
        self._full = build_chain(retriever, chat.bind(reuse="off"))

    def ask(self, question: str, *, reuse_first: bool) -> Row:
        """Both answers to a question. Alternating who goes first keeps the machine's drift out of the ratio."""
        if reuse_first:
            reused, full = self._answer(self._reusing, question), self._answer(self._full, question)
        else:
            full, reused = self._answer(self._full, question), self._answer(self._reusing, question)
        documents = reorder(self._retriever.invoke(question))
        sources = tuple(str(document.metadata.get("source", "?")) for document in documents)
        return Row(question=question, sources=sources, reused=reused, full=full)

    def _answer(self, chain: Runnable[str, str], question: str) -> Answer:
        last = _LastMessage()
        text = chain.invoke(question, config={"callbacks": [last]})
        message = last.message
        details, usage = message.response_metadata, message.usage_metadata
        assert usage is not None  # ChatKVBoost always reports it
        return Answer(
            text=text,
            token_ids=tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]),
            prompt_tokens=usage["input_tokens"],
            **{name: details[name] for name in Answer.__dataclass_fields__ if name in details},
        )


class _LastMessage(BaseCallbackHandler):
    """Keeps the chat model's message, whose statistics the string parser drops."""

    message: AIMessage

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        generation = response.generations[0][0]
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            self.message = generation.message
