"""Tool calls of local models, for every integration: descriptions, formats, parsing, constrained decoding."""
