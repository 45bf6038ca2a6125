"""A Tinker service: its clients, what its errors mean, and how it divides gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import tinker

from agl_core.errors import ConfigError, EngineError
from agl_core.protocols import PolicySpec
from agl_tinker.plugin import TinkerOptions

Client = TypeVar("Client")
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_UNEMBED = {"lm_head"}
_LINEAR = 1e3
"""Adam's epsilon in a probe: beside it a gradient's own size is nothing, so that a step is linear in the gradient."""
_SEEN = 0.02
"""The change of a log-probability that a probe has to make: larger than rounding, small enough to be linear."""


class Service:
    """The service of the settings. EngineError if there is no key."""

    def __init__(self, options: TinkerOptions) -> None:
        self.options = options
        self.place = options.base_url or "Tinker"
        key = os.environ.get(options.api_key_env)
        if not key:
            raise EngineError(
                f"The environment variable {options.api_key_env} has no key for {self.place}. Set it, or name another "
                f"in engine.tinker.api_key_env."
            )
        with self.explained("asked for a session"):
            self.client = tinker.ServiceClient(api_key=key, base_url=options.base_url)

    def base_of(self, spec: PolicySpec) -> str:
        return self.options.base_model or spec.name or spec.model

    def samples(self, spec: PolicySpec) -> tinker.SamplingClient:
        """A sampler of a policy's base."""
        with self.explained(f"asked for a sampler of {self.base_of(spec)!r}"):
            return self.ready(self.client.create_sampling_client(base_model=self.base_of(spec)))

    def trains(self, spec: PolicySpec, seed: int) -> tinker.TrainingClient:
        """A new adapter of a policy's base."""
        assert spec.lora is not None, "the run's side checks it"
        targets = set(spec.lora.targets)
        parts = {"train_attn": _ATTENTION, "train_mlp": _MLP, "train_unembed": _UNEMBED}
        if rest := targets - _ATTENTION - _MLP - _UNEMBED:
            raise ConfigError(f"A Tinker service adapts no layers called {', '.join(sorted(rest))}.")
        if partly := [names for names in parts.values() if names & targets and not names <= targets]:
            missing = sorted(set().union(*partly) - targets)
            raise ConfigError(
                f"A Tinker service adapts all linear layers of attention, of the MLP, or none. "
                f"Add {', '.join(missing)} to model.lora.targets, or leave out the others of their kind."
            )
        chosen: Any = {part: names <= targets for part, names in parts.items()}
        with self.explained(f"asked for an adapter of {self.base_of(spec)!r}"):
            client = self.client.create_lora_training_client(
                base_model=self.base_of(spec), rank=spec.lora.rank, seed=seed, **chosen
            )
            return self.ready(client)

    def ready(self, client: Client) -> Client:
        """A client itself: the newest releases give a future of it."""
        return client.result(self.options.timeout) if hasattr(client, "result") else client

    @contextmanager
    def explained(self, when: str) -> Iterator[None]:
        """EngineError with a sentence for an error of the service, or of the way to it."""
        options = self.options
        try:
            yield
        except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
            raise EngineError(
                f"{self.place} refuses the key in {options.api_key_env}, {when}: {_said(error)}"
            ) from error
        except tinker.RateLimitError as error:
            raise EngineError(
                f"{self.place} gives no more for now, {when}: {_said(error)} Look at the quota."
            ) from error
        except (tinker.APIConnectionError, TimeoutError) as error:
            raise EngineError(
                f"{self.place} does not answer, {when} ({type(error).__name__}). Look at engine.tinker.base_url and at "
                f"the network; the run resumes from its last checkpoint."
            ) from error
        except (tinker.TinkerError, ValueError) as error:  # The client's own for a request that failed.
            raise EngineError(f"{self.place} failed, {when}: {_said(error)}") from error


def _said(error: Exception) -> str:
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."


@dataclass(frozen=True)
class Division:
    """The divisor of a step's gradient: each row's targets, the number of rows, both, or nothing."""

    by_targets: bool
    by_rows: bool

    def undone(self, targets: int, rows: int) -> float:
        """The factor for a row of so many targets in a step of so many rows."""
        return (targets if self.by_targets else 1) * (rows if self.by_rows else 1)

    @classmethod
    def probed(cls, client: tinker.TrainingClient, tokens: Sequence[int], timeout: float) -> Division:
        """Find it out by steps that are taken back: of a row, of the row twice, and of the row with a tail.

        A step of Adam without momentum and with a large epsilon is linear in the gradient, and so is the change of a
        log-probability, if it is small: the opposite step takes it back. The client is of no use afterwards.
        """
        row, longer = [*tokens], [*tokens, *tokens]
        target = len(tokens) - 2

        def change(rows: Sequence[Sequence[int]], rate: float) -> float:
            values = list[float]()
            for advantage in (1.0, -1.0):
                values.append(_logprobs(client, row, timeout)[target])
                data = [_datum(of, target, values[-1], advantage) for of in rows]
                client.forward_backward(data, "importance_sampling").result(timeout)
                step = tinker.AdamParams(learning_rate=rate * _LINEAR, beta1=0.0, beta2=0.0, eps=_LINEAR)
                client.optim_step(step).result(timeout)
            return values[1] - values[0]

        rate = 1e-4
        while (alone := change([row], rate)) < _SEEN:
            if rate > 1e6:
                raise EngineError("The service's steps change no log-probability: its division cannot be found out.")
            rate *= 8
        twice, with_tail = change([row, row], rate), change([longer], rate)
        return cls(by_targets=with_tail < 0.75 * alone, by_rows=twice < 1.5 * alone)


def _logprobs(client: tinker.TrainingClient, tokens: Sequence[int], timeout: float) -> Sequence[float]:
    [output] = client.forward([_datum(tokens, 0, 0.0, 0.0)], "cross_entropy").result(timeout).loss_fn_outputs
    return cast(Sequence[float], output["logprobs"].data)


def _datum(tokens: Sequence[int], target: int, logprob: float, advantage: float) -> tinker.Datum:
    """A row with an advantage at one target."""
    is_target = [n == target for n in range(len(tokens) - 1)]
    return datum(tokens, [logprob * at for at in is_target], [advantage * at for at in is_target])


def datum(tokens: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float]) -> tinker.Datum:
    """A row for the loss `importance_sampling`, with one value for each token but the first."""

    def tensor(values: Sequence[float], dtype: Literal["int64", "float32"]) -> tinker.TensorData:
        return tinker.TensorData(data=[*values], dtype=dtype, shape=[len(values)])

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            "logprobs": tensor(logprobs, "float32"),
            "advantages": tensor(advantages, "float32"),
        },
    )
