"""A node postprocessor, last of the list: orders nodes so that a prompt begins as an earlier one did."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import Field, PrivateAttr, SkipValidation, model_validator

from kvboost_rag import ConfigError
from kvboost_rag.frameworks import BATCH_DOCUMENTS, STRICT, PrefixOrders, awarm_all, checked, off_loop, warm_all

from .nodes import SEPARATOR, EngineSource, NodeTemplate, NodeWarmer, bare

_FIRST_OR_LAST: dict[str, Literal["first", "last"]] = {"best_first": "first", "best_last": "last"}


class KVBoostNodePostprocessor(EngineSource, BaseNodePostprocessor):
    """Prepares retrieved nodes for reuse. No node is dropped or doubled, and the nodes given stay as they are.

    Example:
        >>> index.as_query_engine(llm=llm, node_postprocessors=[reranker, KVBoostNodePostprocessor()])

    Nodes are found in a prompt wherever they stand, so that none of this is needed for reuse. What it adds:

    - ``order``: retrieval ranks differ from question to question, so that prompts over the same nodes have no common
      beginning. An order that continues one served before gives them one, which is used as it was served, without
      repair; in exact mode it is all that is reused of nodes. Synthesizers keep the order they are given. It changes
      what the model reads first, so answers may differ from those of rank order.
    - ``hide_metadata``: metadata that differs from question to question, such as the ``retrieval_score`` that
      `SentenceTransformerRerank` may write, makes the text of a node another each time. Named keys are not shown to the
      LLM, so that the prompt has the text that is warm.
    - ``warm``: nodes that are not warm yet are warmed first. Without it they are kept when the prompt runs, which costs
      nothing extra; with it they are kept also by engines that store no prompts.
    """

    order: Literal["best_last", "best_first", "keep"] = "best_last"
    """Where the best node, which comes first, goes: last, next to the question, or first; or keep the order."""
    max_orders: int = Field(default=1024, ge=1)
    """Orders remembered per namespace; the one used longest ago goes first."""
    hide_metadata: list[str] = Field(default_factory=list)
    """Metadata keys that the LLM is not shown."""
    warm: bool = False
    """Warm nodes that are not warm yet; needs `engine` or `llm`."""
    separator: str = SEPARATOR
    """For this and the next see `warm_nodes`."""
    node_template: Annotated[NodeTemplate | None, SkipValidation] = Field(default=None, exclude=True)

    model_config = STRICT
    _orders: PrefixOrders = PrivateAttr()

    @model_validator(mode="after")
    @checked
    def _check_warming(self) -> KVBoostNodePostprocessor:
        given = self.engine is not None or self.llm is not None
        if self.warm and not given:
            raise ConfigError("warm is True, but there is nothing to warm with; give engine= or llm=")
        if self.warm and self.engine is not None:
            self._warmer()  # a bad argument raises here and not at the first question
        if not self.warm and self.engine is not None:
            raise ConfigError("engine= has no effect without warm=True")
        if not self.warm and (self.separator != SEPARATOR or self.node_template is not None):
            raise ConfigError("separator= and node_template= have no effect without warm=True")
        if self.order == "keep" and not self.warm and not self.hide_metadata:
            raise ConfigError(
                "order is 'keep', and nothing is hidden or warmed: this would change nothing; leave it out"
            )
        return self

    def model_post_init(self, context: Any, /) -> None:
        """Begin with no orders remembered."""
        self._orders = PrefixOrders(self.max_orders)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised pipelines."""
        return "KVBoostNodePostprocessor"

    def __getstate__(self) -> dict[str, Any]:
        if self.engine is not None or (self.llm is not None and self.llm.engine is not None):
            raise ConfigError(
                "this postprocessor was made from an engine, which holds a model and cannot be pickled; give llm=, "
                "made with model=, to send it to another process"
            )
        return super().__getstate__()

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        shown = self._shown(nodes)
        if self.warm:
            warmer = self._warmer()
            warm_all(warmer, map(warmer.render, shown), total=len(shown), show_progress=False)
        return self._ordered(shown)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        shown = self._shown(nodes)
        if self.warm:
            warmer = await off_loop(self._warmer)
            await awarm_all(warmer, map(warmer.render, shown), total=len(shown), show_progress=False)
        return self._ordered(shown)  # far less than a millisecond: needs no thread

    def _shown(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return [NodeWithScore(node=self._hiding(found), score=found.score) for found in nodes]

    def _hiding(self, found: NodeWithScore) -> Any:
        node = bare(found)
        hidden = [key for key in self.hide_metadata if key in node.metadata]
        if not hidden:
            return node
        # Not a deep copy: an IndexNode may refer to a whole index.
        keys = list(dict.fromkeys([*node.excluded_llm_metadata_keys, *hidden]))
        return node.model_copy(update={"excluded_llm_metadata_keys": keys})

    def _ordered(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        if self.order == "keep":
            return nodes
        parts = [(found.node.node_id, found.node.get_content(metadata_mode=MetadataMode.LLM)) for found in nodes]
        return self._orders.arrange(nodes, parts, self.tenant, best=_FIRST_OR_LAST[self.order])

    def _warmer(self) -> NodeWarmer:
        return self.node_warmer(
            metadata_mode=MetadataMode.LLM,
            separator=self.separator,
            node_template=self.node_template,
            batch_size=BATCH_DOCUMENTS,
        )
