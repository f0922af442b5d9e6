"""A model as it is now: its parts are built anew when its structure changes, and its identity follows its weights."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from .assembly import Parts, assemble
from .config import EngineConfig
from .fingerprints import Watch, fingerprint
from .library import Library
from .scheduler import scheduler_of
from .transfer.bridge import Transfer

REMEMBERED = 64  # fingerprints of states the model was in: switching between adapters must not hash it every time


class LiveModel:
    """Base of `Engine`: a model, and everything that is built around it.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer, or None.
        config: of the engine.
        transfer: maps another model's KV into this one's, or None.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig, transfer: Transfer | None) -> None:
        self._model = model.eval()
        self._tokenizer, self._config, self._transfer = tokenizer, config, transfer
        self._watch, self._watch_lock = Watch(self.model), threading.Lock()
        self._fingerprints: OrderedDict[Hashable, str] = OrderedDict()
        self._assemble()
        if transfer is not None:
            transfer.check_target(self._current_fingerprint())

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer; make another engine to use another one."""
        return self._tokenizer

    @property
    def config(self) -> EngineConfig:
        """The configuration the engine was made with."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """Identity of the model as it is now: weights, adapter, tokenizer, rotary frequencies, dtype, codec."""
        return self._current_fingerprint()

    @property
    def window_tokens(self) -> int:
        """Most tokens that prompt and answer may have together: the model's context window."""
        return self._window_tokens

    def current_library(self) -> Library:
        """Where the KV of the model as it is now is stored."""
        return self._library

    def _assemble(self) -> None:
        """Inspect and check the model, and build everything that depends on its structure."""
        self._structure, state = self._watch.look()
        with scheduler_of(self.model).alone():
            parts = assemble(self.model, self.tokenizer, self.config, self._transfer)
        self._fingerprints[state] = parts.fingerprint
        self.checked, self.calibration = parts.checked, parts.calibration
        self._window_tokens = parts.window_tokens
        self._encoder, self._library = parts.encoder, parts.library
        self._codec, self.codec_check = parts.codec, parts.codec_check
        self._warmer, self._serving = parts.warmer, parts.serving
        self._assembled(parts)

    def _assembled(self, parts: Parts) -> None:
        """Told of new parts."""

    def _current_fingerprint(self) -> str:
        """Fingerprint of the model as it is now: what was stored under another stays out of reach."""
        with self._watch_lock:
            structure, state = self._watch.look()
            if structure != self._structure:
                self._library.close()
                self._assemble()
            elif state not in self._fingerprints:
                self._fingerprints[state] = fingerprint(self.model, self.tokenizer, self._codec)
                if len(self._fingerprints) > REMEMBERED:
                    self._fingerprints.popitem(last=False)
            return self._fingerprints[state]
