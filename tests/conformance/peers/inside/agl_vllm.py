"""A plugin of pytest that stands in for vLLM where its tests import it: its server is the one of OPENAI_BASE_URL.

What else they take from vLLM skips the test that uses it, which is then one of vLLM's own code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

_URL = os.environ["OPENAI_BASE_URL"]
_ROOT = _URL.removesuffix("/v1")
_OPTIONS: Any = {"api_key": "none", "max_retries": 0, "timeout": 60}


class RemoteOpenAIServer:
    """The server that is running, whatever model and arguments a test wants."""

    url_root = _ROOT

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def url_for(self, *parts: str) -> str:
        return "/".join((_ROOT, *(part.strip("/") for part in parts)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=_URL, **_OPTIONS | options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=_URL, **_OPTIONS | options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=_ROOT, **_OPTIONS | options)


class _Absent:
    """A name of vLLM's."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"uses {self.__name__}")

    def __getattr__(self, name: str) -> _Absent:
        return _Absent(f"{self.__name__}.{name}")


_PRESENT = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "get_tokenizer": lambda *_, **__: AutoTokenizer.from_pretrained(os.environ["AGL_POLICY"]),
    "hf_api": MagicMock(),
    "ROCM_EXTRA_ARGS": [],
    "current_platform": MagicMock(**{"is_rocm.return_value": False}),
}


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _PRESENT[name] if name in _PRESENT else _Absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" or name == "tests.utils" else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


sys.meta_path.insert(0, _Finder())
