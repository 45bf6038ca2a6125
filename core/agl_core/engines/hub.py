"""Whether a model of the Hugging Face hub is within reach, checked before an engine's process starts.

The hub's own libraries try an unreachable hub again and again, for half a minute, in a process that took seconds to
start. This asks once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import httpx

from agl_core.config.sections import HUB_NAME
from agl_core.errors import EngineError

_PATIENCE = httpx.Timeout(3.0)
_YES = frozenset({"1", "ON", "YES", "TRUE"})


def check_models(models: Iterable[str]) -> None:
    """EngineError for a model that is neither a folder nor downloaded, while the hub does not answer or is not asked.

    Whether an answering hub has the model is the engine's to find out: it may need credentials.
    """
    for model in dict.fromkeys(models):
        is_of_the_hub = HUB_NAME.fullmatch(model) and not Path(model).exists()
        reason = _why_out_of_reach(model) if is_of_the_hub and downloaded(model) is None else None
        if reason is not None:
            raise EngineError(
                f"There is no folder '{model}', no model of that name in {_cache()}, and {reason}. Check the spelling "
                f"and the network. Without a network: download the model elsewhere (hf download {model}), then name "
                f"its folder, or copy it to this cache and set HF_HUB_OFFLINE=1."
            )


def _why_out_of_reach(model: str) -> str | None:
    if any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return "the Hugging Face hub is not asked, as HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        httpx.head(f"{hub}/{model}/resolve/main/config.json", timeout=_PATIENCE)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return f"the Hugging Face hub at {hub} does not answer ({error})"
    return None


def downloaded(model: str) -> Path | None:
    """The folder of a hub model's revision in the cache, if any is there; the engine finds out whether it is whole."""
    found = (_cache() / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return next((file.parent for file in found), None)


def _cache() -> Path:
    """Where huggingface_hub keeps models."""
    user = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{user}/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
