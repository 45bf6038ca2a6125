"""veRL's own algorithms and configuration classes, as agl names them. Needs veRL, but no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_core.protocols import EngineContext, PolicySpec
from agl_verl import plugin
from agl_verl.config import ChosenAlgorithm, compose
from agl_verl.environment import MODULES_VARIABLE
from agl_verl.plugin import VerlOptions
from agl_verl.process import check_registered

from . import verl_bench

verl_bench.one_process()
from verl.trainer.ppo.core_algos import (  # noqa: E402  (the plugin is loaded with it)
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
)
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"


def test_what_agl_knows_of_verls_registries_is_there() -> None:
    """A new version of veRL that brings another estimator of groups is to be looked at."""
    assert ADV_ESTIMATOR_REGISTRY.keys() > plugin.GROUPED
    assert plugin.UNUSABLE.keys() < ADV_ESTIMATOR_REGISTRY.keys() | POLICY_LOSS_REGISTRY.keys()
    for loss in POLICY_LOSS_REGISTRY.keys() - plugin.UNUSABLE.keys():
        check_registered(plugin.NativeOptions(loss=loss))


OWN = """
from verl.trainer.ppo.core_algos import register_adv_est
@register_adv_est("mine")
def mine(token_level_rewards, response_mask, **unused):
    return response_mask.float(), response_mask.float()
"""


def test_an_estimator_of_the_users_own_is_looked_up_where_verl_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_estimators.py").write_text(OWN)
    program = (
        "from agl_verl.plugin import NativeOptions\n"
        "from agl_verl.process import check_registered\n"
        "for name in ('mine', 'other'):\n"
        "    check_registered(NativeOptions(estimator=name, modules=('my_estimators',)))\n"
        "    print(name, 'is there')\n"
    )
    monkeypatch.setenv(MODULES_VARIABLE, "my_estimators")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "mine is there" in done.stdout
    assert "other is there" not in done.stdout
    assert "No estimator 'other' is registered with veRL, after importing my_estimators: " in done.stderr
    assert ", grpo, " in done.stderr
    assert "remax" not in done.stderr.partition("ConfigError")[2]


@pytest.mark.parametrize(("name", "place"), [("dp", "fsdp_config"), ("megatron", "megatron"), ("veomni", "veomni")])
def test_verls_own_classes_take_the_configuration_of_every_model_engine(name: str, place: str) -> None:
    optimizer = {"learning_rate": 1e-4, "schedule": "cosine"}
    policy = PolicySpec(str(POLICY), "bfloat16", optimizer=optimizer)
    context = EngineContext(Path("unused"), 3, {"default": policy}, False, (), "key", 10)
    offload = [f"{role}.{place}.param_offload=True" for role in ("actor_rollout_ref.actor", "critic")]
    overrides = {"dp": [], "megatron": ["model_engine=megatron", *offload], "veomni": ["model_engine=veomni", *offload]}
    options = VerlOptions(device="cuda", gpus_per_node=4, overrides=overrides[name])
    algorithm = ChosenAlgorithm.of("grpo", {"beta": 0.1}).build()
    config = compose(options, context, algorithm=algorithm, cpu=False)
    actor, critic = (omega_conf_to_dataclass(each) for each in (config.actor_rollout_ref.actor, config.critic))
    assert actor.engine.param_offload is critic.engine.param_offload is (name != "dp")
    assert actor.optim.lr == 1e-4
    assert type(actor.engine) is type(critic.engine)
