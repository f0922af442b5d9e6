"""What an engine does, for tools that watch services: `prometheus` and `otel`, each an optional extra."""
