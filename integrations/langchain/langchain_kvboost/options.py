"""What the chat model and the text model have in common, beyond what every framework's classes have."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_core.utils import secret_from_env
from pydantic import Field, SecretStr

from kvboost_rag.frameworks import CALL_FIELDS, STRICT, EngineOptions

__all__ = ["CALL_FIELDS", "STRICT", "LangChainOptions"]


class LangChainOptions(EngineOptions):
    """Fields of every LangChain class that answers with an engine."""

    made_from: ClassVar[tuple[str, ...]] = (*EngineOptions.made_from, "api_key")

    api_key: SecretStr | None = Field(default_factory=secret_from_env("HF_TOKEN", default=None), exclude=True)
    """Token of the Hugging Face hub, for gated models; read from HF_TOKEN by default."""
    streaming: bool | None = None
    """True: `invoke` streams inside, so that callbacks see every piece. False: `stream` of a chat model gives one."""

    model_config = STRICT

    def _loading(self) -> dict[str, Any]:
        options = super()._loading()
        if self.api_key is not None:
            options.setdefault("token", self.api_key.get_secret_value())
        return options
