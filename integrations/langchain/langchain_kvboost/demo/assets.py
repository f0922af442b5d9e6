"""Which model, embeddings and folder the demo uses when none is named."""

from __future__ import annotations

import os
import platform
from pathlib import Path

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDINGS_ID = "sentence-transformers/all-MiniLM-L6-v2"


def cache_root() -> Path:
    """The user's cache folder: `KVBOOST_CACHE`, else `kvboost-rag` in the XDG cache."""
    named = os.environ.get("KVBOOST_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvboost-rag"


def default_model() -> str:
    """`KVBOOST_MODEL`, else the model that `make` has fetched, else its id on the Hugging Face hub."""
    return os.environ.get("KVBOOST_MODEL") or _fetched("smollm2-135m-instruct") or MODEL_ID


def default_embeddings() -> str:
    """`KVBOOST_EMBEDDINGS`, else the embedding model that `make` has fetched, else its id on the hub."""
    return os.environ.get("KVBOOST_EMBEDDINGS") or _fetched("all-minilm-l6-v2") or EMBEDDINGS_ID


def python_documents_folder() -> Path:
    """Where Python's own documentation is written; one folder per Python version, whose texts differ."""
    return cache_root() / "documents" / f"python-{platform.python_version()}"


def _fetched(name: str) -> str | None:
    folder = cache_root() / "models" / name
    return str(folder) if (folder / "config.json").is_file() else None
