"""The arms of `peers.py`: each a script that runs in a process of its own and answers JSON lines (see `serve.py`)."""
