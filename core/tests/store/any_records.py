"""Any record that there can be, for hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from agl_core.types import (
    Annotation,
    Attempt,
    Call,
    Choice,
    Ending,
    FinishReason,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Source,
    Task,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)

any_text = st.text(st.characters(exclude_categories=()), max_size=8)
"""Lone surrogates and NUL included: models and exceptions produce them."""
key_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
whole = st.integers(0, 2**40)
finite = st.floats(allow_nan=False, allow_infinity=False)
real = finite.map(lambda value: value + 0.0)
"""Without -0.0: SQLite's REAL columns do not keep that sign (JSON and arrays do)."""
any_real = st.floats().map(lambda value: value + 0.0)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=8,
)
json_objects = st.dictionaries(any_text, json_values, max_size=4)


def drawn(dtype: Any) -> st.SearchStrategy[Any]:
    """Arrays of any bits, drawn as a length and a seed: element by element would take long."""
    lengths = st.integers(0, 20) | st.sampled_from([255, 256, 257, 512, 1100])
    data = st.builds(lambda n, seed: np.random.default_rng(seed).bytes(4 * n), lengths, st.integers(0, 9))
    if dtype is np.bool_:
        return data.map(lambda drawn: np.frombuffer(drawn, np.uint8) > 99)
    return data.map(lambda drawn: np.frombuffer(drawn, dtype))


tokens, logprobs, masks = drawn(np.int32), drawn(np.float32), drawn(np.bool_)
samplings = st.builds(Sampling, st.none() | finite, st.none() | finite, st.none() | whole, st.none() | st.integers())
choices = st.builds(
    Choice,
    st.integers(0, 5),
    json_objects,
    st.sampled_from(FinishReason),
    st.none() | tokens,
    st.none() | logprobs,
    st.none() | masks,
    st.none() | any_text,
)
requests = st.builds(
    lambda plain, lists: {**plain, **lists},
    json_objects,
    st.dictionaries(
        st.sampled_from(["messages", "tools", "input"]),
        st.builds(lambda first, rest: [first, *rest], json_objects, st.lists(json_values, max_size=3)),
    ),
)
calls = st.builds(
    Call,
    id=key_text,
    rollout=key_text,
    attempt=whole,
    sequence=whole,
    policy=key_text,
    version=st.none() | whole,
    request=requests,
    choices=st.lists(choices, max_size=3).map(tuple),
    started=real,
    ended=real,
    api=key_text,
    agent=st.none() | any_text,
    parent_span=st.none() | any_text,
    prompt_ids=st.none() | tokens,
    requested=samplings,
    effective=samplings,
    prefix_broken=st.booleans(),
    prefilled=whole,
    reused=whole,
    late=st.booleans(),
    pruned=st.booleans(),
    retry_of=st.none() | any_text,
    trace=st.none() | any_text,
)
rollouts = st.builds(
    Rollout,
    key_text,
    key_text,
    whole,
    key_text,
    st.builds(Task, any_text, json_values, any_text, json_objects),
    st.sampled_from(Mode),
    whole,
    whole,
    st.sampled_from(RolloutState),
    st.none() | whole,
    st.none() | st.sampled_from(Ending),
    whole,
)
attempts = st.builds(
    Attempt,
    key_text,
    whole,
    key_text,
    real,
    st.none() | real,
    st.none() | st.sampled_from(Ending),
    json_values,
    st.none() | any_text,
)
tool_results = st.builds(
    ToolResult,
    key_text,
    key_text,
    whole,
    any_text,
    st.sampled_from(ToolStatus),
    st.none() | any_text,
    json_values,
    json_values,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | real,
    st.none() | real,
    st.sampled_from(Source),
    st.none() | any_text,
    st.none() | any_text,
)
rewards = st.builds(Reward, key_text, whole, key_text, any_real, key_text, st.none() | key_text, whole)
training_records = st.builds(
    TrainingRecord,
    key_text,
    whole,
    key_text,
    whole,
    whole,
    st.none() | any_real,
    st.none() | any_real,
    any_real,
    st.none() | key_text,
)
annotations = st.builds(
    Annotation,
    key_text,
    whole,
    key_text,
    real,
    json_objects,
    st.none() | key_text,
)
runs = st.builds(Run, key_text, whole, real, json_values, st.none() | whole)
