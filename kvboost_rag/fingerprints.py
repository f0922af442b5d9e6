"""Identity of a model: what must be equal for stored KV to belong to it."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Identity of weights, adapters, tokenizer, RoPE and dtype; canonical across processes and machines."""
    h = xxhash.xxh3_128(b"kvboost-rag 1")
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"):
        config.pop(volatile, None)
    h.update(json.dumps(config, sort_keys=True, default=str).encode())
    h.update(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        h.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        h.update(text.encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def weights_version(model: Any) -> int:
    """A cheap number that changes when weights are replaced, edited in place, or an adapter is attached."""
    return hash(tuple((id(p), p.data_ptr(), _version_of(p)) for p in model.parameters()))


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
