"""What crosses between a run and its engine's process, as lines of JSON.

The run writes its settings and then commands to the process's standard input; a command's body follows its line. The
process answers on standard output, each line with the number of the command that it belongs to: any number of stages
or of progress lines, then a value or an error. A line without a number says what the engine lost; the process ends
after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter

from agl_core import errors
from agl_core.errors import AglError
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types import RecordedReply, TokenizedReply

START = 0
"""The number of the settings: the answer to them says that the engine serves, or why it does not start."""
Action: TypeAlias = Literal[
    "update", "save", "load", "versions", "stats", "estimate", "publish", "withdraw", "merge", "tokenize", "logprobs"
]
_CONTEXT = TypeAdapter(EngineContext)
SPEC = TypeAdapter(PolicySpec)
"""The body that says which policy to load."""
Options = TypeVar("Options", bound=BaseModel)


class Command(BaseModel):
    """What the engine is to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    do: Action
    folder: Path | None = None
    """Of save, load and merge."""
    policy: str | None = None
    """Of publish, withdraw and tokenize."""
    size: int = 0
    """Bytes that follow: of update and logprobs an `UpdateRequest`, an estimate's `Workload`, of publish and merge a
    policy's spec, of tokenize the replies."""

    def encode(self, body: bytes = b"") -> bytes:
        """The line and its body; the process may have another working directory."""
        folder = self.folder and self.folder.absolute()
        return self.model_copy(update={"size": len(body), "folder": folder}).model_dump_json().encode() + b"\n" + body


class Answer(BaseModel):
    """One line about a command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int | None
    """None: no command was asked; the engine lost a part of itself."""
    progress: float | None = None
    stage: str | None = None
    """What the start does from now on."""
    value: Any = None
    error: str | None = None
    kind: str | None = None
    """The class of an error that was raised on purpose."""

    @classmethod
    def of_error(cls, number: int, error: Exception) -> Answer:
        """An error on purpose crosses as it is, any other as one line with its class."""
        if isinstance(error, AglError):
            return cls(number=number, error=str(error), kind=type(error).__name__)
        return cls(number=number, error=in_one_line(error))

    def encode(self) -> bytes:
        """The line; floats survive exactly."""
        return orjson.dumps(self.model_dump(exclude_defaults=True)) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Answer:
        return cls.model_validate(orjson.loads(line))

    @property
    def error_class(self) -> type[AglError] | None:
        """The class of an error on purpose; None for any other error."""
        kind = getattr(errors, self.kind or "", None)
        return kind if isinstance(kind, type) and issubclass(kind, AglError) else None


class Ready(BaseModel):
    """The value of the answer to the settings."""

    urls: tuple[str, ...]
    """OpenAI-compatible base URLs, each ending in /v1."""
    context_length: int
    """0: it serves nothing yet."""


def encode_settings(options: BaseModel, context: EngineContext) -> bytes:
    """The first line to the process; its paths hold whatever the working directory."""
    absolute = replace(
        context,
        run_dir=context.run_dir.absolute(),
        plugin_files=tuple(file.absolute() for file in context.plugin_files),
    )
    value = {"options": options.model_dump(mode="json"), "context": _CONTEXT.dump_python(absolute, mode="json")}
    return orjson.dumps(value) + b"\n"


def decode_settings(line: bytes, options: type[Options]) -> tuple[Options, EngineContext]:
    value = orjson.loads(line)
    return options.model_validate(value["options"]), _CONTEXT.validate_python(value["context"])


def encode_replies(replies: Sequence[RecordedReply]) -> bytes:
    """The body that says what to tokenise."""
    return json.dumps([asdict(reply) for reply in replies]).encode()  # Unlike orjson, it takes lone surrogates.


def decode_replies(body: bytes) -> list[RecordedReply]:
    return [RecordedReply(**reply) for reply in json.loads(body)]


def encode_tokens(replies: Sequence[TokenizedReply | None]) -> list[list[list[int]] | None]:
    """The answer to `encode_replies`, as JSON values."""
    return [None if r is None else [r.prompt_ids.tolist(), r.response_ids.tolist()] for r in replies]


def decode_tokens(value: Sequence[Sequence[Sequence[int]] | None]) -> list[TokenizedReply | None]:
    return [None if v is None else TokenizedReply(*(np.array(ids, np.int32) for ids in v)) for v in value]


def in_one_line(error: Exception) -> str:
    """An error's class and the last line of its text.

    >>> in_one_line(ValueError("a traceback of another process\\nno such luck"))
    'ValueError: no such luck'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
