"""A configuration that learns from sessions is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from agl_core.config.load import load
from agl_core.errors import CapabilityError, ConfigError
from agl_online.config import learn_section, online_section

PLUGIN = """
import agl_core
from agl_core import Capability, kinds

@agl_core.hookimpl
def register_components(register):
    built = lambda options, *context: options
    provides = {Capability.TOKEN_IDS, Capability.REFERENCE}
    register(kinds.ENGINE, "poor", built, provides=provides)
    register(kinds.ENGINE, "rich", built, provides=provides | {Capability.RECORDED_TEXTS})
    register(kinds.ALGORITHM, "easy", built)
    register(kinds.ALGORITHM, "comparing", built, needs={Capability.GROUPS})
"""
LEARNING: dict[str, Any] = {
    "config_version": 1,
    "plugins": ["parts.py"],
    "agent": {"entry": "an_agent:solve"},
    "tasks": {name: {"source": "jsonl", "path": "tasks.jsonl"} for name in ("train", "eval")},
    "policies": {"default": {"model": {"path": "."}}},
    "rewards": {"users": {"rule": "feedback", "modes": ["use"]}},
    "algorithm": {"name": "easy"},
    "engine": {"name": "rich"},
    "online": {"applications": {"shop": 1}},
    "learn": {"sessions_per_step": 4},
}


def loaded(folder: Path, *overrides: str, **tables: Any) -> Any:
    (folder / "parts.py").write_text(PLUGIN)
    config = {**LEARNING, **tables}
    (folder / "train.toml").write_text(tomli_w.dumps({name: part for name, part in config.items() if part is not None}))
    return load(folder / "train.toml", overrides)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"algorithm": {"name": "comparing"}}, ("only one of its kind", "reinforce++ or ppo")),
        ({"algorithm": {"name": "grpo"}}, ("earlier versions answered", "Set its importance_cap")),
        ({"async": {"max_staleness": 2}}, ("[async] has no place beside [learn]", "Leave [async] out")),
        ({"tasks": {"train": LEARNING["tasks"]["train"]}}, ("on held-out tasks", "[tasks.eval]")),
        ({"eval": {"modes": ["eval-greedy"]}}, ("sampled replies", "'eval-sampled' to eval.modes")),
        ({"policies": dict.fromkeys("ab", LEARNING["policies"]["default"])}, ("one policy, and there are 2",)),
        ({"engine": {"name": "poor"}}, ("'poor'", "cannot measure", "Use the engine torch")),
        ({"rewards": {}}, ("no rule scores any", '[rewards.users] rule = "feedback"')),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    if "policies" in changes:
        changes["policies"]["a"] = {**changes["policies"]["a"], "agents": ["a"]}
    with pytest.raises(CapabilityError) as raised:
        learn_section(loaded(tmp_path, **changes))
    assert all(text in str(raised.value) for text in parts), raised.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"online": None}, "There is no [online]"),
        ({"online": {"applications": {"shop": 1}, "upstream": "http://a/v1"}}, "leave out online.upstream"),
        ({"learn": None}, "[online] needs `upstream`"),
    ],
)
def test_somebody_has_to_answer(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        online_section(loaded(tmp_path, **changes))
    assert says in str(raised.value)
