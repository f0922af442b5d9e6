"""Where the engine of a framework's class comes from, and how its answers are sampled: fields, checks, identity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    field_serializer,
    field_validator,
    model_validator,
)

from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..errors import ConfigError
from .engines import loaded_engine, place_of, plain, shared_engine

Reuse: TypeAlias = Literal["off", "exact", "approximate"]
T = TypeVar("T")

SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_TAKING = ("transfer", "source")
CALL_FIELDS = frozenset((*SAMPLING_FIELDS, "namespace", "reuse", "timeout"))
# Of two bases, the configuration of the last one wins, so each class repeats it: unknown arguments must raise.
STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


def checked(check: Callable[[T], T]) -> Callable[[T], T]:
    """Let pydantic report what a validator refuses, like everything else that is wrong with a class's arguments."""

    @functools.wraps(check)
    def wrapped(made: T) -> T:
        try:
            return check(made)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return wrapped


class EngineOptions(BaseModel):
    """Fields and helpers of every framework's class that answers with an engine."""

    made_from: ClassVar[tuple[str, ...]] = ("engine_config", "model_kwargs")
    """Fields that say how `model` is loaded, which an engine that is given has no use for."""

    engine: Annotated[Engine | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    """An engine to use. Give this or `model`."""
    model: str | None = None
    """Hugging Face id or folder. Loaded at the first call; one engine per model, configuration and process."""
    engine_config: EngineConfig | None = None
    """Configuration of the engine of `model`."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `Engine.from_pretrained` for `model`: revision, dtype, device, gguf_file, …"""
    transfers: dict[str, str] = Field(default_factory=dict)
    """Maps for KV transfer (`kvboost-rag transfer fit`), by the id or folder of the model that `on_model` names: it
    takes over what this one has read, instead of reading it again."""
    max_retries: int = Field(default=0, ge=0)
    """How often loading `model` is tried again when a download fails; an answer itself needs no network."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up with a `RequestTimeoutError`; None waits."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    top_p: float | None = None
    """None: what the model's own generation config says. So for the next three."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: list[str] | None = None
    """Strings that end every answer; stops given per call are added."""
    namespace: str | None = None
    """Tenant whose documents may be reused; None is the engine's default."""
    reuse: Reuse | None = None
    """What may be reused, no wider than the engine was made for; None is the engine's mode."""

    _taking: dict[str, Any] = PrivateAttr(
        default_factory=dict
    )  # what `on_model` adds: a map, and the engine it is from

    model_config = STRICT

    @field_validator(*SAMPLING_FIELDS, "max_retries", "timeout", mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic would make a number of it
            raise ValueError(f"{value} is no number")
        return value

    @model_validator(mode="after")
    @checked
    def _check_arguments(self) -> Self:
        if (self.engine is None) == (self.model is None):
            raise ConfigError(f"{type(self).__name__} needs either engine= or model=, and not both")
        if self.engine is not None:
            if not isinstance(self.engine, Engine):
                raise ConfigError(
                    f"engine is a {type(self.engine).__name__}; give an Engine, or model= for an id or folder"
                )
            for name in self.made_from:
                if name in self.model_fields_set and getattr(self, name):
                    raise ConfigError(f"{name}= has no effect on an engine that exists; configure the engine itself")
        self._sampling(None, {})  # a bad value raises here and not at the first question
        return self

    @field_serializer("model_kwargs", when_used="json")
    def _plain_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: plain(value) for name, value in options.items()}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for engine in (self.engine, self._taking.get("source")):
            memo[id(engine)] = engine  # a copy asks the same engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None or self._taking:
            raise ConfigError(
                f"{type(self).__name__} was made from an engine, which holds a model and cannot be pickled; make it "
                "with model= to send it to another process, which then loads the model itself"
            )
        return super().__getstate__()

    def get_engine(self) -> Engine:
        """The engine, loading the model if this is the first use."""
        if self.engine is not None:
            return self.engine
        options = self._loading()
        return shared_engine(str(self.model), self.engine_config, options=options, retries=self.max_retries)

    def on_model(self, name: str) -> Self:
        """The same settings on another model, which takes over what this one has read if `transfers` has a map to it.

        Args:
            name: hub id or folder. It is loaded as this one was, at its first use, and then shared.
        """
        if not isinstance(name, str):
            raise ConfigError(f"model is a {type(name).__name__}; give a hub id or a folder, as a string")
        if (place := place_of(name)) == place_of(self.name_of_model()):
            return self
        config = self.engine_config if self.engine is None else self.engine.config
        given = {key: value for key, value in self.model_kwargs.items() if key not in _TAKING}  # of this model's own
        changed = {"engine": None, "model": name, "engine_config": config, "model_kwargs": given, "transfers": {}}
        other = self.model_copy(update=changed)
        maps = {place_of(target): mapping for target, mapping in self.transfers.items()}
        other._taking = {"transfer": maps[place], "source": self.get_engine()} if place in maps else {}
        return other

    def _loading(self) -> dict[str, Any]:
        """Further arguments of `Engine.from_pretrained`."""
        return {**self.model_kwargs, **self._taking}

    def _loaded(self) -> Engine | None:
        """The engine, if it is there already."""
        if self.engine is not None:
            return self.engine
        return loaded_engine(str(self.model), self.engine_config, options=self._loading())

    def request_options(
        self, stop: str | Sequence[str] | None, call: Mapping[str, Any], further: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Options of the engine for one call: instance values, overridden by the call's, and further ones to sample."""
        if unknown := sorted(call.keys() - CALL_FIELDS):
            raise ConfigError(f"unknown arguments {unknown}; a call takes stop, {', '.join(sorted(CALL_FIELDS))}")
        return {
            "sampling": self._sampling(stop, call, further),
            "namespace": call.get("namespace", self.namespace),
            "reuse": call.get("reuse", self.reuse),
            "timeout_s": call.get("timeout", self.timeout),
        }

    def _sampling(
        self, stop: str | Sequence[str] | None, call: Mapping[str, Any], further: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        stops = dict.fromkeys([*_as_list(self.stop), *_as_list(stop)])
        values = {name: call.get(name, getattr(self, name)) for name in SAMPLING_FIELDS}
        return SamplingParams(**{"stop": tuple(stops), **values, **(further or {})})

    def name_of_model(self) -> str:
        """Id or folder of the model, for reports."""
        return str(self.model if self.engine is None else self.engine.model.name_or_path)

    def _identity(self) -> dict[str, Any]:
        """Everything that changes an answer, for response caches to key on."""
        engine = self._loaded()  # its weights may have changed since they were read, and its recipe is measured
        config = self.engine_config or EngineConfig() if self.engine is None else self.engine.config
        return {
            "model": self.name_of_model(),
            # Names do not tell all models apart: an engine knows its weights, a folder its files.
            "fingerprint": _files(str(self.model)) if engine is None else engine.fingerprint,
            "model_kwargs": repr(sorted(self.model_kwargs.items())),
            "transfer": self._taking.get("transfer"),
            "engine_config": repr(config),
            "recipe": None if engine is None else repr(engine.recipe),
            "stop_sequences": self.stop,
            "namespace": self.namespace,
            "reuse": self.reuse,
            **{name: getattr(self, name) for name in SAMPLING_FIELDS},
        }


def _as_list(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    if isinstance(stop, str):
        return [stop]
    if not isinstance(stop, Iterable):
        raise ConfigError(f"stop is {stop!r}; give a string, or a list of strings")
    return list(stop)


def _files(model: str) -> str | None:
    """Names, sizes and times of a model folder's files; None for a hub id, which its revision tells apart."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
