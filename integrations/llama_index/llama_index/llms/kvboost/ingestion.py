"""Warming LlamaIndex nodes: as the text that prompts will hold, in batches, from any iterable or in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn, Self
from uuid import uuid4

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from pydantic import Field, PrivateAttr, SkipValidation, model_validator

from kvboost_rag import ConfigError, Engine, WarmReport
from kvboost_rag.frameworks import BATCH_DOCUMENTS, STRICT, awarm_all, checked, off_loop, size_of, warm_all

from .nodes import SEPARATOR, AnyNode, EngineSource, NodeTemplate, NodeWarmer


def warm_nodes(
    engine: Engine,
    nodes: Iterable[AnyNode],
    *,
    metadata_mode: MetadataMode = MetadataMode.LLM,
    separator: str = SEPARATOR,
    node_template: NodeTemplate | None = None,
    namespace: str | None = None,
    batch_size: int = BATCH_DOCUMENTS,
    show_progress: bool = False,
) -> WarmReport:
    """Compute and keep the KV of nodes, as the text that prompts will hold: for indexes filled earlier, or a restart.

    A second call over the same nodes computes nothing. Batches that were warmed before an error stay warm. In exact
    mode an engine finds a node only at the very beginning of a prompt.

    Example:
        >>> warm_nodes(llm.get_engine(), stored_nodes(index))

    Args:
        engine: the engine the LLM uses.
        nodes: nodes, nodes with scores, or documents; any iterable, read batch by batch and never held as a whole.
        metadata_mode: what synthesizers and chat engines show of the metadata: `MetadataMode.LLM`. A
            `CitationQueryEngine` may be made with another.
        separator: what synthesizers put between two nodes. It is warmed with the text only if this tokenizer merges it
            with the end of the text, so that the text's last tokens would not be found without it.
        node_template: for prompts that show nodes in another way: a text with ``{metadata_str}`` and ``{content}`` in
            the place of the node's own `text_template`, or a function from a node to a string.
        namespace: tenant that may use them; the engine's default if None.
        batch_size: nodes per call of the engine, which encodes neighbours together.
        show_progress: draw a progress bar.

    Returns:
        The engine's report, summed over distinct texts; a duplicate is warmed once and counted once.

    Raises:
        PromptError: a node cannot be rendered; says which, and why.
        ConfigError: an argument has no such value, or the engine reuses nothing.
    """
    warmer = NodeWarmer(
        engine,
        metadata_mode=metadata_mode,
        separator=separator,
        node_template=node_template,
        namespace=namespace,
        batch_size=batch_size,
    )
    return warm_all(warmer, map(warmer.render, nodes), total=size_of(nodes), show_progress=show_progress)


async def awarm_nodes(
    engine: Engine,
    nodes: Iterable[AnyNode],
    *,
    metadata_mode: MetadataMode = MetadataMode.LLM,
    separator: str = SEPARATOR,
    node_template: NodeTemplate | None = None,
    namespace: str | None = None,
    batch_size: int = BATCH_DOCUMENTS,
    show_progress: bool = False,
) -> WarmReport:
    """`warm_nodes` off the event loop. Cancelling the task ends it after the batch that is running."""
    warmer = NodeWarmer(
        engine,
        metadata_mode=metadata_mode,
        separator=separator,
        node_template=node_template,
        namespace=namespace,
        batch_size=batch_size,
    )
    return await awarm_all(warmer, map(warmer.render, nodes), total=size_of(nodes), show_progress=show_progress)


def forget_nodes(
    engine: Engine,
    nodes: Iterable[AnyNode],
    *,
    metadata_mode: MetadataMode = MetadataMode.LLM,
    separator: str = SEPARATOR,
    node_template: NodeTemplate | None = None,
    namespace: str | None = None,
) -> int:
    """Drop the KV of nodes, warmed or seen inside prompts; returns how many chunks held them.

    The arguments are those of `warm_nodes`. KV that was computed behind a forgotten text goes with it: warm the nodes
    that stay once more. `KVBoostVectorStore` does so by itself.
    """
    warmer = NodeWarmer(
        engine,
        metadata_mode=metadata_mode,
        separator=separator,
        node_template=node_template,
        namespace=namespace,
        batch_size=BATCH_DOCUMENTS,
    )
    return warmer.forget(list(dict.fromkeys(map(warmer.render, nodes))))


async def aforget_nodes(engine: Engine, nodes: Iterable[AnyNode], **options: Any) -> int:
    """`forget_nodes` off the event loop."""
    return await off_loop(lambda: forget_nodes(engine, nodes, **options))


class WarmKV(EngineSource, TransformComponent):
    """Warms the nodes of an `IngestionPipeline` and hands them on unchanged. Put it last: later steps may change texts.

    Example:
        >>> IngestionPipeline(transformations=[SentenceSplitter(), TitleExtractor(), WarmKV(llm=llm), embed_model])

    What LlamaIndex's pipeline does, and what follows:

    - Its cache gives back the results of nodes it saw before, in this or an earlier process. KV may be gone by then, so
      a `WarmKV` never matches the cache and always looks at its nodes; what is warm costs no more than a look. Each run
      leaves an entry with its nodes in the cache. If one cache serves many runs over the same nodes, put `WarmKV` in
      front of the embedding model, so that the entries are small, use `disable_cache=True`, or see the end.
    - ``num_workers`` sends transformations to other processes, whose KV nobody would see: that raises a `ConfigError`.
    - A docstore keeps unchanged documents away from all transformations. After a restart, warm the index:
      ``warm_nodes(engine, stored_nodes(index))``.

    A `KVBoostVectorStore` as the pipeline's vector store has none of these limits, and forgets what is deleted.
    """

    metadata_mode: MetadataMode = MetadataMode.LLM
    """For this and the next three see `warm_nodes`."""
    separator: str = SEPARATOR
    node_template: Annotated[NodeTemplate | None, SkipValidation] = Field(default=None, exclude=True)
    batch_size: int = BATCH_DOCUMENTS
    show_progress: bool = False
    """Draw a progress bar."""

    model_config = STRICT
    _report: WarmReport | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    @checked
    def _check_warming(self) -> WarmKV:
        if self.engine is None and self.llm is None:
            raise ConfigError("WarmKV needs engine= or llm=, to warm nodes with")
        if self.engine is not None:
            self._warmer()  # a bad argument raises here and not in the middle of a run
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised pipelines."""
        return "WarmKV"

    @property
    def report(self) -> WarmReport | None:
        """What the last run warmed; None before the first. A run that did not come here leaves it as it is."""
        return self._report

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What the pipeline's cache is keyed on: never the same twice, since KV is no part of a cached result."""
        return {**super().to_dict(**kwargs), "run": uuid4().hex}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """What `to_dict` gave; give the engine or the LLM again."""
        made: Self = super().from_dict({name: value for name, value in data.items() if name != "run"}, **kwargs)
        return made

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes; further arguments are those a pipeline gives to all its transformations."""
        warmer = self._warmer()
        texts = map(warmer.render, nodes)
        self._report = warm_all(warmer, texts, total=len(nodes), show_progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same off the event loop. Cancelling the task ends it after the batch that is running."""
        warmer = await off_loop(self._warmer)
        texts = map(warmer.render, nodes)
        self._report = await awarm_all(warmer, texts, total=len(nodes), show_progress=self.show_progress)
        return nodes

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            "a WarmKV cannot be sent to another process, whose KV would be lost: leave num_workers out, or leave "
            "WarmKV out and warm what the pipeline returns, as in warm_nodes(engine, pipeline.run(..., num_workers=2))"
        )

    def _warmer(self) -> NodeWarmer:
        return self.node_warmer(
            metadata_mode=self.metadata_mode,
            separator=self.separator,
            node_template=self.node_template,
            batch_size=self.batch_size,
        )
