"""LlamaIndex nodes as prompts show them, and where an index keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Self, TypeAlias

from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import BaseModel, Field, SkipValidation, model_validator

from kvboost_rag import ConfigError, Engine, PromptError
from kvboost_rag.frameworks import STRICT, TextWarmer, checked, untorn

from .base import KVBoost

AnyNode: TypeAlias = BaseNode | NodeWithScore
NodeTemplate: TypeAlias = str | Callable[[BaseNode], str]
NodeSource: TypeAlias = BaseIndex[Any] | BasePydanticVectorStore | BaseDocumentStore
SEPARATOR = "\n\n"  # what LlamaIndex puts between two nodes
READ_NODES = 256  # of a docstore at once: an index may be larger than memory


class NodeWarmer(TextWarmer):
    """Renders nodes as prompts do and warms the texts; the arguments are those of `warm_nodes`."""

    def __init__(
        self,
        engine: Engine,
        *,
        metadata_mode: MetadataMode,
        separator: str,
        node_template: NodeTemplate | None,
        namespace: str | None,
        batch_size: int,
    ) -> None:
        super().__init__(engine, separator=separator, namespace=namespace, batch_size=batch_size)
        if not isinstance(metadata_mode, MetadataMode):
            raise ConfigError(f"metadata_mode is {metadata_mode!r}; give one of MetadataMode, as MetadataMode.LLM")
        if node_template is not None and not isinstance(node_template, str) and not callable(node_template):
            raise ConfigError(
                f"node_template is a {type(node_template).__name__}; give a text with {{metadata_str}} and "
                "{{content}}, or a function from a node to a string"
            )
        self._mode, self._template = metadata_mode, node_template

    def render(self, node: AnyNode) -> str:
        """The text of a node inside a prompt.

        Raises:
            PromptError: it cannot be rendered, or the result is not text.
        """
        node = bare(node)
        try:
            text = self._rendered(node)
        except Exception as error:
            raise PromptError(f"the text of {_name(node)} cannot be made: {error!r}; mend its templates") from error
        if not isinstance(text, str):
            raise PromptError(f"node_template gave a {type(text).__name__} for {_name(node)}; it must give a string")
        return untorn(text, _name(node)).strip()  # synthesizers strip what they join

    def _rendered(self, node: BaseNode) -> Any:
        if callable(self._template):
            return self._template(node)
        if self._template is not None:
            node = node.model_copy(update={"text_template": self._template})
        return node.get_content(metadata_mode=self._mode)


class EngineSource(BaseModel):
    """Fields of a component that warms: an engine, or the LLM that answers with it."""

    engine: Annotated[Engine | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    """The engine the LLM uses. Give this or `llm`."""
    llm: Annotated[KVBoost | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    """The LLM, whose model is loaded at the first call."""
    namespace: str | None = None
    """Tenant that may use what is warmed; that of `llm`, or the engine's default, if None."""

    model_config = STRICT

    @model_validator(mode="after")
    @checked
    def _check_source(self) -> EngineSource:
        if self.llm is not None and not isinstance(self.llm, KVBoost):
            raise ConfigError(f"llm is a {type(self.llm).__name__}; give a KVBoost, or an engine as engine=")
        if self.engine is not None and self.llm is not None:
            raise ConfigError(f"{type(self).__name__} needs either engine= or llm=, and not both")
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # a copy asks the same engine
        return super().__deepcopy__(memo)

    @property
    def tenant(self) -> str | None:
        """Whose the nodes are; None is the engine's default."""
        return self.llm.namespace if self.namespace is None and self.llm is not None else self.namespace

    def node_warmer(self, **options: Any) -> NodeWarmer:
        """Renders and warms for this component. Loads the model if need be.

        Raises:
            ConfigError: there is no engine.
        """
        if self.engine is None and self.llm is None:
            raise ConfigError(f"{type(self).__name__} needs engine= or llm= to warm nodes")
        engine: Any = self.engine if self.llm is None else self.llm.get_engine()
        return NodeWarmer(engine, namespace=self.tenant, **options)


def bare(node: AnyNode) -> BaseNode:
    """The node, without its score.

    Raises:
        PromptError: it is none.
    """
    found = node.node if isinstance(node, NodeWithScore) else node
    if not isinstance(found, BaseNode):
        raise PromptError(f"nodes holds a {type(found).__name__}; give nodes, nodes with scores, or documents")
    return found


def stored_nodes(source: NodeSource) -> Iterator[BaseNode]:
    """Every node that an index, a docstore, or a vector store that keeps text, holds: to warm it after a restart.

    Example:
        >>> warm_nodes(engine, stored_nodes(load_index_from_storage(storage_context)))

    Nodes that were deleted from an index are left out, also if its docstore still has them.

    Raises:
        ConfigError: the texts are not kept there; says what to give instead.
    """
    if isinstance(source, BaseDocumentStore):
        return iter(list(source.docs.values()))
    if isinstance(source, BasePydanticVectorStore):
        return iter(_nodes_in(source))
    if isinstance(source, VectorStoreIndex):
        keeps_nodes = not source.vector_store.stores_text or getattr(source, "_store_nodes_override", False)
        if not keeps_nodes:
            return iter(_nodes_in(source.vector_store))
        ids = list(source.index_struct.nodes_dict.values())
        held = getattr(source.vector_store, "inner", source.vector_store)
        if isinstance(held, SimpleVectorStore):  # `delete_nodes` leaves deleted ones in the index struct
            ids = [name for name in ids if name in held.data.embedding_dict]
        return _nodes_of(source.docstore, list(dict.fromkeys(ids)))
    if isinstance(source, SummaryIndex):
        return _nodes_of(source.docstore, list(dict.fromkeys(source.index_struct.nodes)))
    if isinstance(source, BaseIndex):
        return iter(list(source.docstore.docs.values()))
    raise ConfigError(
        f"a {type(source).__name__} cannot be enumerated; give an index, a docstore, or a vector store that keeps text"
    )


def _nodes_of(docstore: BaseDocumentStore, ids: list[str]) -> Iterator[BaseNode]:
    """Nodes of an index, read piece by piece; what is missing is found now and not in the middle of it."""
    missing = next((name for name in ids if not docstore.document_exists(name)), None)
    if missing is not None:
        raise ConfigError(
            f"the index lists node {missing!r}, but its docstore has no such node; load the docstore that was "
            "persisted with the index, or give the nodes themselves"
        )
    return (node for at in range(0, len(ids), READ_NODES) for node in docstore.get_nodes(ids[at : at + READ_NODES]))


def _nodes_in(store: BasePydanticVectorStore) -> Iterable[BaseNode]:
    try:
        if store.stores_text:
            return store.get_nodes()
    except NotImplementedError:
        pass
    raise ConfigError(
        f"a {store.class_name()} cannot give back the nodes' texts; give the index, whose docstore may have them, or "
        "the nodes themselves"
    )


def _name(node: BaseNode) -> str:
    return f"node {node.node_id!r}"
