"""LlamaIndex integration of kvboost-rag. The package is reserved here; its classes are not written yet."""

__all__: list[str] = []
