"""KV of one model as KV of another one of its family, so that a switch of models need not read everything again."""
