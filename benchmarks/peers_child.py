"""One arm's process, seen from `peers.py`: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One thread for every library that may bring a pool of its own.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
ENVIRONMENT = {**ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
TAIL_CHARACTERS = 600
QUIT_S = 30.0


class ArmError(Exception):
    """An arm could not be started, refused a request, or ended; the message says why."""


class Child:
    """A running arm that answers JSON lines.

    Raises:
        ArmError: it ended before it was ready; the message has the end of what it wrote to standard error.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        try:
            self.about: dict[str, Any] = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        """Give the arm documents to learn ahead."""
        return self._request({"op": "warm", "texts": list(texts)})

    def ask(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """First token, seconds to it, tokens reused."""
        return self._request({"op": "ask", "prompt": prompt})

    def close(self) -> None:
        """End this process, and no other."""
        process = self._process
        if process.poll() is None:
            try:
                process.communicate('{"op": "quit"}\n', timeout=QUIT_S)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
                process.communicate()
        else:
            process.communicate()
        self._errors.close()

    def _request(self, content: dict[str, Any]) -> dict[str, Any]:
        try:
            print(json.dumps(content), file=self._process.stdin, flush=True)
        except OSError as error:
            raise ArmError(f"{self.name} is gone: {error}{self._tail()}") from error
        reply = self._read()
        if "error" in reply:
            raise ArmError(f"{self.name}: {reply['error']}")
        return reply

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise ArmError(f"{self.name} ended with status {self._process.wait()}{self._tail()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _tail(self) -> str:
        self._errors.seek(0)
        said = " ".join(self._errors.read()[-TAIL_CHARACTERS:].split())
        return f"; it said: {said}" if said else ""


def python_command(python: Path | str, script: Path, settings: dict[str, Any]) -> list[str]:
    """The command of an arm's script with its settings."""
    return [str(python), str(script), json.dumps(settings)]
