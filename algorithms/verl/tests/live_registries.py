"""agl's algorithms and configurations where a run of veRL's own trainer finds them, held to veRL's own. Needs veRL,
but no Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from agl_core.protocols import EngineContext, PolicySpec
from agl_verl import plugin
from agl_verl.config import ChosenAlgorithm, compose, differences
from agl_verl.environment import MODULES_VARIABLE
from agl_verl.losses import PREFIX, check_registered
from agl_verl.plugin import VerlOptions

from . import verl_bench

verl_bench.one_process()
from verl.trainer.config import AlgoConfig  # noqa: E402  (the plugin is loaded with it)
from verl.trainer.ppo.core_algos import (  # noqa: E402
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"


def rectangle(seed: int = 0) -> dict[str, Tensor]:
    """Six rows of two groups, padded on the right."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 7, 5, 7, 1, 4])
    mask = (torch.arange(7) < lengths[:, None]).float()
    old = -2 + 0.3 * torch.randn(6, 7, generator=random)
    rewards = torch.zeros(6, 7)
    rewards[torch.arange(6), lengths - 1] = torch.randn(6, generator=random)
    return {
        "mask": mask,
        "old": old,
        "new": old + 0.2 * torch.randn(6, 7, generator=random),
        "rewards": rewards,
        "advantages": torch.rand(6, 7, generator=random) * mask,
    }


@pytest.mark.parametrize(("ours", "verls"), [("agl:grpo", "grpo"), ("agl:reinforce++", "reinforce_plus_plus")])
def test_estimators(ours: str, verls: str) -> None:
    made = rectangle()
    arguments: dict[str, Any] = {
        "token_level_rewards": made["rewards"],
        "response_mask": made["mask"],
        "index": np.array(["a", "a", "b", "a", "b", "b"], dtype=object),
        "config": AlgoConfig(gamma=1.0),
    }
    found, returns = get_adv_estimator_fn(ours)(**arguments)
    expected, _ = get_adv_estimator_fn(verls)(**arguments)
    torch.testing.assert_close(found, expected * made["mask"], rtol=1e-5, atol=1e-6)
    assert returns.shape == found.shape


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["agl:grpo", "agl:reinforce++", "agl:ppo"])
def test_losses_and_their_gradients(name: str, mode: str) -> None:
    """With advantages that are not negative veRL's dual clip does nothing."""
    made = rectangle(1)
    batch = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 9}
    config = SimpleNamespace(
        clip_ratio=0.1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        get=lambda key, default=None: default,
        global_batch_info=batch,
    )
    gradients, losses = [], []
    for loss_of in (get_policy_loss_fn(name), get_policy_loss_fn("vanilla")):
        current = made["new"].clone().requires_grad_()
        loss, _ = loss_of(made["old"], current, made["advantages"], made["mask"], mode, config, None)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(current.grad)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    assert gradients[0][made["mask"] == 0].abs().max() == 0


def test_an_aggregation_that_weights_cannot_express_is_refused() -> None:
    made = rectangle()
    config = SimpleNamespace(clip_ratio_low=0.1, clip_ratio_high=0.1, global_batch_info={})
    with pytest.raises(ValueError, match="token-mean"):
        get_policy_loss_fn("agl:grpo")(
            made["old"], made["new"], made["advantages"], made["mask"], "seq-mean-token-sum", config, None
        )


def test_everything_in_verls_registries_is_usable_by_name_or_refused_with_a_reason() -> None:
    """A new version of veRL that brings another one is noticed here."""
    estimators = {name for name in ADV_ESTIMATOR_REGISTRY if not name.startswith(PREFIX)}
    losses = {name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX)}
    assert estimators == plugin.ESTIMATORS | plugin.UNUSABLE_ESTIMATORS.keys()
    assert losses == plugin.LOSSES | plugin.UNUSABLE_LOSSES.keys()
    for name in plugin.NAMES:
        check_registered(plugin.options_of(name)())


OWN = """
from verl.trainer.ppo.core_algos import register_adv_est
@register_adv_est("mine")
def mine(token_level_rewards, response_mask, **unused):
    return response_mask.float(), response_mask.float()
"""


def test_an_estimator_of_the_users_own_is_looked_up_where_verl_has_it(tmp_path: Path) -> None:
    (tmp_path / "my_estimators.py").write_text(OWN)
    program = (
        "from agl_verl.plugin import options_of\n"
        "from agl_verl.losses import check_registered\n"
        "for name in ('mine', 'other'):\n"
        "    check_registered(options_of('verl:vanilla')(estimator=name, modules=('my_estimators',)))\n"
        "    print(name, 'is there')\n"
    )
    environment = {**os.environ, MODULES_VARIABLE: "my_estimators", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
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
    shown = OmegaConf.to_container(differences(config))
    assert place in shown["actor_rollout_ref"]["actor"]
    assert "model_engine" not in shown, "compared with veRL's defaults for this engine"
