"""veRL's model engines: each gets the keys that it has, and refuses what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agl_algorithms.options import PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.errors import ConfigError
from agl_verl.config.native import options_of
from agl_verl.options import VerlOptions

from .test_verl_settings import grpo, mapping_of

ACTOR, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
PLACES = {
    "fsdp": (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp"),
    "megatron": (f"{ACTOR}.megatron", f"{REFERENCE}.megatron", "critic.megatron"),
    "veomni": (f"{ACTOR}.veomni", f"{REFERENCE}.veomni", "critic.veomni"),
}
PLAIN: dict[str, Any] = {"spec": {"optimizer": {}}}


def test_policy_reference_and_critic_are_computed_alike() -> None:
    """veRL's own default for a reference is bfloat16, whatever the policy has."""
    engines = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    for dtype, cpu, offload in (("float32", False, True), ("bfloat16", False, False), ("auto", True, False)):
        found = mapping_of(grpo(beta=0.1), cpu=cpu, spec={"dtype": dtype}, offload=offload)
        settings = [
            {key.removeprefix(engine): value for key, value in found.items() if key.startswith(f"{engine}.")}
            for engine in engines
        ]
        settings[0].pop(".seed")
        assert settings[0] == settings[1] == settings[2]
        assert settings[1][".param_offload"] is offload
        assert settings[1][".mixed_precision"]["param_dtype"] == ("bf16" if dtype == "bfloat16" else "fp32")


@pytest.mark.parametrize("engine", PLACES)
def test_an_engine_gets_its_own_keys_and_no_others(engine: str) -> None:
    found = mapping_of(model_engine=engine, offload=True, **PLAIN)
    for place in PLACES[engine]:
        assert (found[f"{place}.param_offload"], found[f"{place}.optimizer_offload"]) == (True, True)
    others = [place for name, places in PLACES.items() if name != engine for place in places]
    assert not [key for key in found if key.startswith(tuple(f"{place}." for place in others))]
    assert any(key.endswith(".strategy") for key in found) is (engine == "fsdp"), "veRL's files know the others"


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ("fsdp", "ulysses_sequence_parallel_size"),
        ("megatron", "context_parallel_size"),
        ("veomni", "ulysses_parallel_size"),
    ],
)
def test_tokens_of_a_transition_are_spread_over_gpus_by_every_engine(engine: str, key: str) -> None:
    found = mapping_of(model_engine=engine, sequence_parallel=2, gpus_per_node=4, **PLAIN)
    assert [found[f"{place}.{key}"] for place in PLACES[engine]] == [2, 2, 2]


def test_sequence_parallel_needs_whole_shares_of_the_gpus_and_flash_attention() -> None:
    with pytest.raises(ValidationError, match="sequence_parallel is 2, which does not divide the 3 GPUs"):
        VerlOptions(gpus_per_node=3, sequence_parallel=2)
    spread: dict[str, Any] = {"gpus_per_node": 2, "sequence_parallel": 2}
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


def test_megatron_gets_the_schedule_by_its_own_name() -> None:
    optimizer = {"learning_rate": 2e-4, "schedule": "cosine"}
    found = mapping_of(model_engine="megatron", spec={"optimizer": optimizer})
    assert found[f"{ACTOR}.optim.lr_decay_style"] == "cosine"
    assert f"{ACTOR}.optim.lr_scheduler_type" not in found


def test_megatron_recomputes_activations_as_asked() -> None:
    key = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
    assert mapping_of(model_engine="megatron")[key] == "full"
    assert key not in mapping_of(model_engine="megatron", gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("engine", "asked", "told"),
    [
        ("megatron", {"cpu": True}, "it needs GPUs"),
        ("megatron", {"spec": {"lora": {"rank": 8}}}, "LoRA"),
        ("veomni", {"attention": "sdpa"}, "attention"),
        ("megatron", {"spec": {"dtype": "float32"}}, "bfloat16 only"),
        ("megatron", {"algorithm": Ppo(PpoOptions())}, "critics start at random"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine: str, asked: dict[str, Any], told: str) -> None:
    mapping_of(grpo(), model_engine=engine, **PLAIN)
    with pytest.raises(ConfigError, match=f"model_engine '{engine}' does not go with these settings: .*{told}"):
        mapping_of(model_engine=engine, **{**PLAIN, **asked})


def test_verls_own_critic_starts_as_verl_likes() -> None:
    assert mapping_of(options_of("verl:gae")(), model_engine="megatron")["critic.enable"] is True
