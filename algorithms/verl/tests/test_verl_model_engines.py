"""veRL's model engines: FSDP2 gets agl's settings, any other is the user's by `overrides`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agl_algorithms.plugin import PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.errors import ConfigError
from agl_verl.config.native import options_of
from agl_verl.options import VerlOptions

from .test_verl_settings import grpo, mapping_of

ACTOR, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
FSDP = (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp")
MEGATRON: dict[str, Any] = {"overrides": ["model_engine=megatron"]}


def test_policy_reference_and_critic_are_computed_alike() -> None:
    """veRL's own default for a reference is bfloat16, whatever the policy has."""
    for dtype, cpu, offload in (("float32", False, True), ("bfloat16", False, False), ("auto", True, False)):
        found = mapping_of(grpo(beta=0.1), cpu=cpu, spec={"dtype": dtype}, offload=offload)
        settings = [
            {key.removeprefix(place): value for key, value in found.items() if key.startswith(f"{place}.")}
            for place in FSDP
        ]
        settings[0].pop(".seed")
        assert settings[0] == settings[1] == settings[2]
        assert settings[1][".param_offload"] is offload
        assert settings[1][".mixed_precision"]["param_dtype"] == ("bf16" if dtype == "bfloat16" else "fp32")


def test_tokens_of_a_transition_are_spread_over_whole_shares_of_the_gpus_by_flash_attention() -> None:
    spread: dict[str, Any] = {"gpus_per_node": 4, "sequence_parallel": 2}
    found = mapping_of(**spread)
    assert [found[f"{place}.ulysses_sequence_parallel_size"] for place in FSDP] == [2, 2, 2]
    with pytest.raises(ValidationError, match="sequence_parallel is 2, which does not divide the 3 GPUs"):
        VerlOptions(gpus_per_node=3, sequence_parallel=2)
    for unable in ({"attention": "sdpa"}, {"cpu": True}):
        with pytest.raises(ConfigError, match=r"sequence_parallel.*flash-attention"):
            mapping_of(**spread, **unable)


def test_passes_without_gradients_may_be_larger_but_not_smaller() -> None:
    found = mapping_of(tokens_per_micro_batch=100, tokens_per_scoring_pass=400)
    assert found[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 100
    assert found[f"{REFERENCE}.log_prob_max_token_len_per_gpu"] == 400
    assert mapping_of(tokens_per_micro_batch=100)[f"{REFERENCE}.log_prob_max_token_len_per_gpu"] == 100
    with pytest.raises(ValidationError, match="could not be scored"):
        VerlOptions(tokens_per_micro_batch=100, tokens_per_scoring_pass=99)


def test_another_engine_gets_none_of_fsdps_keys_and_the_schedule_by_its_own_name() -> None:
    found = mapping_of(options_of("verl:gae")(), spec={"optimizer": {"schedule": "cosine"}}, **MEGATRON)
    assert not [key for key in found if "fsdp" in key or key.endswith(".strategy")]
    assert found[f"{ACTOR}.optim.lr_decay_style"] == "cosine"
    assert f"{ACTOR}.optim.lr_scheduler_type" not in found
    assert found["critic.enable"] is True


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cpu": True}, "it needs GPUs"),
        ({"spec": {"lora": {"rank": 8}}}, "LoRA"),
        ({"attention": "sdpa"}, "attention"),
        ({"offload": True}, "are FSDP's"),
        ({"algorithm": Ppo(PpoOptions())}, "critics start at random"),
    ],
)
def test_what_does_not_go_with_another_engine_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"model_engine=megatron does not go with these settings: .*{told}"):
        mapping_of(**{**MEGATRON, **settings})
