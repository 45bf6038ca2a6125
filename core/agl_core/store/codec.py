"""Records as rows of the tables in `schema`, and back, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from agl_core.errors import StoreRefusedError
from agl_core.store import schema
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces, join_request, join_tokens
from agl_core.store.schema import Table
from agl_core.store.values import (
    UnstorableError,
    dump_float,
    dump_ids,
    dump_int,
    dump_json,
    dump_key,
    dump_logprobs,
    dump_mask,
    dump_text,
    load_float,
    load_ids,
    load_json,
    load_logprobs,
    load_mask,
    load_text,
)
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    FinishReason,
    Mode,
    Outcome,
    OutcomeStatus,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    Use,
)

Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table, list[Row]]
"""What one `put` writes, by table."""


def encode(records: Iterable[Record], pieces: Pieces) -> Rows:
    """The rows of these records, without their pieces. StoreRefusedError names a record that cannot be stored."""
    rows: Rows = {}
    for record in records:
        encoder = _ENCODERS.get(type(record))
        if encoder is None:
            raise StoreRefusedError(f"The store keeps records (Run … Use), not {type(record).__name__}.")
        try:
            encoder(record, rows, pieces)
        except (UnstorableError, TypeError, ValueError) as error:
            raise StoreRefusedError(f"{name_of(record)} cannot be stored: {error}.") from error
    return rows


def _key(record: Attempt | Call | Outcome | Reward | Use, rows: Rows) -> tuple[str, int]:
    """The record's attempt, which has to have a number before rows can refer to it."""
    key = dump_key(record.rollout), dump_int(record.attempt)
    rows.setdefault(schema.ATTEMPT_KEYS, []).append(key)
    return key


def name_of(record: Record) -> str:
    """The record's kind and key, for messages."""
    fields = ("rollout", "attempt", "id", "name", "call", "choice", "step")
    known = [f"{field} {getattr(record, field)!r}" for field in fields if hasattr(record, field)]
    return f"{type(record).__name__} ({', '.join(known)})"


def _encode_run(run: Run, rows: Rows, _: Pieces) -> None:
    rows.setdefault(schema.RUNS, []).append(
        (run.id, dump_int(run.incarnation), run.started, dump_json(run.config), dump_int(run.resumed_step))
    )


def _encode_rollout(rollout: Rollout, rows: Rows, _: Pieces) -> None:
    task = rollout.task
    rows.setdefault(schema.ROLLOUTS, []).append(
        (
            dump_key(rollout.id),
            rollout.run,
            dump_int(rollout.incarnation),
            rollout.group,
            dump_json({"id": task.id, "input": task.input, "split": task.split, "metadata": task.metadata}),
            rollout.mode.value,
            dump_int(rollout.step),
            dump_int(rollout.member),
            rollout.state.value,
            dump_int(rollout.counted_attempt),
            rollout.ending and rollout.ending.value,
        )
    )


def _encode_attempt(attempt: Attempt, rows: Rows, _: Pieces) -> None:
    rows.setdefault(schema.ATTEMPTS, []).append(
        (
            *_key(attempt, rows),
            attempt.worker,
            attempt.started,
            attempt.ended,
            attempt.ending and attempt.ending.value,
            dump_json(attempt.result),
            dump_text(attempt.error),
        )
    )


def _encode_call(call: Call, rows: Rows, pieces: Pieces) -> None:
    key = _key(call, rows)
    request, lists, numbers = pieces.split_request(call.request)
    prompt = dump_ids(call.prompt_ids)
    blocks, tail = (None, None) if prompt is None else pieces.split_tokens(prompt)
    rows.setdefault(schema.CALLS, []).append(
        (
            *key,
            call.id,
            dump_int(call.sequence),
            call.policy,
            dump_int(call.version),
            request,
            lists,
            numbers,
            len(call.choices),
            call.started,
            call.ended,
            call.api,
            dump_text(call.agent),
            dump_text(call.parent_span),
            blocks,
            tail,
            _dump_sampling(call.requested),
            _dump_sampling(call.effective),
            int(call.prefix_broken),
            dump_int(call.prefilled),
            dump_int(call.reused),
            int(call.late),
            dump_text(call.retry_of),
            None if call.state is None else dump_json(call.state),
        )
    )
    choices = rows.setdefault(schema.CHOICES, [])
    for position, choice in enumerate(call.choices):
        choices.append(
            (
                *key,
                call.id,
                position,
                dump_int(choice.index),
                dump_json(choice.message),
                choice.finish_reason.value,
                dump_ids(choice.response_ids),
                dump_logprobs(choice.logprobs),
                dump_mask(choice.mask),
                dump_text(choice.parse_error),
            )
        )


def _dump_sampling(sampling: Sampling) -> str:
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if not math.isfinite(value):
            raise UnstorableError(f"the sampling parameter {name} is {value}; give a finite number, or None")
    return dump_json(given)


def _encode_outcome(outcome: Outcome, rows: Rows, _: Pieces) -> None:
    rows.setdefault(schema.OUTCOMES, []).append(
        (
            *_key(outcome, rows),
            outcome.id,
            dump_text(outcome.tool),
            outcome.status.value,
            dump_text(outcome.tool_call_id),
            dump_json(outcome.arguments),
            dump_json(outcome.result),
            dump_text(outcome.error),
            dump_text(outcome.agent),
            dump_text(outcome.span),
            dump_text(outcome.parent_span),
            outcome.started,
            outcome.ended,
        )
    )


def _encode_reward(reward: Reward, rows: Rows, _: Pieces) -> None:
    rows.setdefault(schema.REWARDS, []).append(
        (
            *_key(reward, rows),
            reward.name,
            dump_float(reward.value),
            reward.source,
            reward.call,
            dump_int(reward.choice),
        )
    )


def _encode_use(use: Use, rows: Rows, _: Pieces) -> None:
    rows.setdefault(schema.USES, []).append(
        (
            *_key(use, rows),
            use.call,
            dump_int(use.choice),
            dump_int(use.step),
            dump_float(use.credit),
            dump_float(use.advantage),
            dump_float(use.weight),
            use.dropped,
        )
    )


_ENCODERS: Mapping[type, Callable[[Any, Rows, Pieces], None]] = {
    Run: _encode_run,
    Rollout: _encode_rollout,
    Attempt: _encode_attempt,
    Call: _encode_call,
    Outcome: _encode_outcome,
    Reward: _encode_reward,
    Use: _encode_use,
}


def decode_run(row: Row) -> Run:
    """A row of `runs`, its values as in `schema`."""
    id_, incarnation, started, config, resumed_step = row
    return Run(id_, incarnation, started, load_json(config), resumed_step)


def decode_rollout(row: Row) -> Rollout:
    """A row of `rollouts`, its values as in `schema`."""
    id_, run, incarnation, group, task, mode, step, member, state, counted_attempt, ending = row
    return Rollout(
        id_,
        run,
        incarnation,
        group,
        Task(**load_json(task)),
        Mode(mode),
        step,
        member,
        RolloutState(state),
        counted_attempt,
        ending and Ending(ending),
    )


def decode_attempt(row: Row) -> Attempt:
    """A row of `attempts`, its values as in `schema`."""
    rollout, attempt, worker, started, ended, ending, result, error = row
    return Attempt(
        rollout, attempt, worker, started, ended, ending and Ending(ending), load_json(result), load_text(error)
    )


def decode_calls(rows: Iterable[Row], choices: Iterable[Row], pieces: Mapping[int, Data]) -> list[Call]:
    """Rows of `calls`, their values as in `schema`; rows of `choices` by position; the pieces that they refer to."""
    of_call: dict[tuple[str, int, str], list[Choice]] = {}
    for row in choices:
        of_call.setdefault(row[:3], []).append(decode_choice(row))
    n_choices = schema.CALLS.values.index("n_choices")
    # Further choices are left from a call with the same key that this one replaced.
    return [_decode_call(row, tuple(of_call.get(row[:3], ())[: row[n_choices]]), pieces) for row in rows]


def _decode_call(row: Row, choices: tuple[Choice, ...], pieces: Mapping[int, Data]) -> Call:
    value = dict(zip(schema.CALLS.values, row, strict=True))
    prompt = None
    if value["prompt_blocks"] is not None:
        prompt = join_tokens(value["prompt_blocks"], value["prompt_tail"], pieces)
    return Call(
        id=value["id"],
        rollout=value["rollout"],
        attempt=value["attempt"],
        sequence=value["sequence"],
        policy=value["policy"],
        version=value["version"],
        request=join_request(value["request"], value["request_lists"], value["request_pieces"], pieces),
        choices=choices,
        started=value["started"],
        ended=value["ended"],
        api=value["api"],
        agent=load_text(value["agent"]),
        parent_span=load_text(value["parent_span"]),
        prompt_ids=load_ids(prompt),
        requested=Sampling(**load_json(value["requested"])),
        effective=Sampling(**load_json(value["effective"])),
        prefix_broken=bool(value["prefix_broken"]),
        prefilled=value["prefilled"],
        reused=value["reused"],
        late=bool(value["late"]),
        retry_of=load_text(value["retry_of"]),
        state=None if value["state"] is None else load_json(value["state"]),
    )


def decode_choice(row: Row) -> Choice:
    """A row of `choices`, its values as in `schema`."""
    _, _, _, _, index, message, finish_reason, response_ids, logprobs, mask, parse_error = row
    return Choice(
        index,
        load_json(message),
        FinishReason(finish_reason),
        load_ids(response_ids),
        load_logprobs(logprobs),
        load_mask(mask),
        load_text(parse_error),
    )


def decode_outcome(row: Row) -> Outcome:
    """A row of `outcomes`, its values as in `schema`."""
    value = dict(zip(schema.OUTCOMES.values, row, strict=True))
    for name in ("arguments", "result"):
        value[name] = load_json(value[name])
    for name in ("tool", "tool_call_id", "error", "agent", "span", "parent_span"):
        value[name] = load_text(value[name])
    return Outcome(**{**value, "status": OutcomeStatus(value["status"])})


def decode_reward(row: Row) -> Reward:
    """A row of `rewards`, its values as in `schema`."""
    rollout, attempt, name, value, source, call, choice = row
    return Reward(rollout, attempt, name, float(value), source, call, choice)


def decode_use(row: Row) -> Use:
    """A row of `uses`, its values as in `schema`."""
    rollout, attempt, call, choice, step, credit, advantage, weight, dropped = row
    return Use(rollout, attempt, call, choice, step, load_float(credit), load_float(advantage), float(weight), dropped)
