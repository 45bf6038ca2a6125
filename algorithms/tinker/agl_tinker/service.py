"""A Tinker service: its clients, what its errors mean, and how it divides gradients."""

from __future__ import annotations

import io
import logging
import os
import re
import tarfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import httpx
import tinker

from agl_core.errors import ConfigError, EngineError
from agl_core.protocols import PolicySpec
from agl_tinker.plugin import TinkerOptions

Client = TypeVar("Client")
Loss: TypeAlias = Literal["cross_entropy", "importance_sampling"]
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_UNEMBED = {"lm_head"}
_LINEAR = 1e3
"""Adam's epsilon in a probe: beside it a gradient's own size is nothing, so that a step is linear in the gradient."""
_SEEN = 0.02
"""The change of a log-probability that a probe has to make: larger than rounding, small enough to be linear."""
_WARNING_INTERVAL, _MAX_WARNING = 30.0, 300
"""Seconds between two of the client's warnings that the run shows, and the characters shown of each."""


class Service:
    """The service of the settings. EngineError if there is no key."""

    def __init__(self, options: TinkerOptions, tell: Callable[[str], None] = lambda waits_for: None) -> None:
        """`tell` gets what is waited for, if it takes long: the client tries again by itself, for minutes."""
        self.options = options
        self.place = options.base_url or "Tinker"
        key = os.environ.get(options.api_key_env)
        if not key:
            raise EngineError(
                f"The environment variable {options.api_key_env} has no key for {self.place}. Set it, or name another "
                f"in engine.tinker.api_key_env."
            )
        logging.getLogger("tinker").addHandler(_Telling(tell))
        with self.explained("asked for a session"):
            self.client = tinker.ServiceClient(api_key=key, base_url=options.base_url)

    def base_of(self, spec: PolicySpec) -> str:
        return self.options.base_model or spec.name or spec.model

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
            given = {"base_model": self.base_of(spec), "rank": spec.lora.rank, "seed": seed, **chosen}
            return self.ready(lambda: self.client.create_lora_training_client(**given))

    def ready(self, create: Callable[[], Client]) -> Client:
        """A client, in time: older releases wait for ever, the newest give a future of it."""
        client: Any = ThreadPoolExecutor(1).submit(create).result(self.options.timeout)
        return cast(Client, client.result(self.options.timeout) if hasattr(client, "result") else client)

    def sampler_of(self, model: str) -> tinker.SamplingClient:
        """A sampler of a model of the service, by its name or by the `tinker://` path of saved weights."""
        chosen: Any = {"model_path" if model.startswith("tinker://") else "base_model": model}
        with self.explained(f"asked for a sampler of {model!r}"):
            return self.ready(lambda: self.client.create_sampling_client(**chosen))

    def download(self, client: Any, name: str, folder: Path) -> None:
        """Write the adapter of a client's weights into a new folder."""
        rest: Any = self.client.create_rest_client()
        timeout = self.options.timeout
        folder.mkdir(parents=True)
        if hasattr(client, "save_weights_external"):  # The newest client gets no archive. An hour is the shortest life.
            path = client.save_weights_external(name, ttl_seconds=3600).result(timeout).path
            for file, url in rest.get_external_weights_urls(path).result(timeout).urls.items():
                (folder / Path(file).name).write_bytes(self._content(url))
            return
        path = client.save_weights_for_sampler(name).result(timeout).path
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")  # skyrl-tx's have no `sampler_weights/`.
        url = rest.get_checkpoint_archive_url(run, checkpoint).result(timeout).url
        with tarfile.open(fileobj=io.BytesIO(self._content(url))) as files:
            files.extractall(folder, filter="data")

    def _content(self, url: str) -> bytes:
        return httpx.get(url, timeout=self.options.timeout, follow_redirects=True).raise_for_status().content

    @contextmanager
    def explained(self, when: str) -> Iterator[None]:
        """EngineError with a sentence for an error of the service, or of the way to it."""
        try:
            yield
        except (tinker.APIConnectionError, TimeoutError) as error:
            raise EngineError(
                f"{self.place} does not answer, {when} ({type(error).__name__}). Look at engine.tinker.base_url and at "
                f"the network; the run resumes from its last checkpoint."
            ) from error
        except (tinker.TinkerError, ValueError, AttributeError) as error:  # The client's own; the last at a first 402.
            chain = (error, error.__cause__, error.__context__)
            cause = next((one for one in chain if isinstance(one, tinker.APIStatusError)), error)
            key = f" Look at the key in {self.options.api_key_env}."
            quota = " Look at the quota, and at what is paid."
            remedy = {401: key, 402: quota, 403: key, 429: quota}.get(getattr(cause, "status_code", 0), "")
            text = str(cause).strip().removesuffix(".")
            raise EngineError(f"{self.place} {'refused' if remedy else 'failed'}, {when}: {text}.{remedy}") from error


class _Telling(logging.Handler):
    """Tells what the client warns of, each once in a while: a job that is paused, and why; a service out of reach."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell, self._told = tell, defaultdict[int, float](float)

    def emit(self, record: logging.LogRecord) -> None:
        if record.created > self._told[record.lineno] + _WARNING_INTERVAL:
            self._told[record.lineno] = record.created
            self._tell(record.getMessage()[:_MAX_WARNING])


@dataclass(frozen=True)
class Division:
    """The divisor of a step's gradient: each row's targets, the number of rows, both, or nothing."""

    by_targets: bool
    by_rows: bool
    weighs: bool
    """The loss `cross_entropy` is the sum of weight · −log π; skyrl-tx divides it by the sum of the weights."""

    def undone(self, targets: int, rows: int) -> float:
        """The factor for a row of so many targets in a step of so many rows."""
        return (targets if self.by_targets else 1) * (rows if self.by_rows else 1)

    @classmethod
    def probed(cls, client: tinker.TrainingClient, tokens: Sequence[int], timeout: float) -> Division:
        """Find it out by steps that are taken back: of a row, of the row twice, of the row with a tail, and weighted.

        A step of Adam without momentum and with a large epsilon is linear in the gradient, and so is the change of a
        log-probability, if it is small: the opposite step takes it back. The client is of no use afterwards.
        """
        row, longer, target = [*tokens], [*tokens, *tokens], len(tokens) - 2

        def logprob() -> float:
            output = client.forward([datum(row, weights=[1.0] * len(row[1:]))], "cross_entropy").result(timeout)
            return cast(float, output.loss_fn_outputs[0]["logprobs"].data[target])

        def change(rows: Sequence[Sequence[int]], rate: float, weight: float | None = None) -> float:
            values = list[float]()
            for sign in (1.0, -1.0):
                values.append(logprob())
                given = {"logprobs": values[-1], "advantages": sign} if weight is None else {"weights": weight * sign}
                data = [
                    datum(
                        of,
                        **{name: [value * (n == target) for n in range(len(of) - 1)] for name, value in given.items()},
                    )
                    for of in rows
                ]
                loss: Loss = "importance_sampling" if weight is None else "cross_entropy"
                client.forward_backward(data, loss).result(timeout)
                step = tinker.AdamParams(learning_rate=rate * _LINEAR, beta1=0.0, beta2=0.0, eps=_LINEAR)
                client.optim_step(step).result(timeout)
            return values[1] - values[0]

        rate = 1e-4
        while (alone := change([row], rate)) < _SEEN:
            if rate > 1e6:
                raise EngineError("The service's steps change no log-probability: its division cannot be found out.")
            rate *= 8
        twice, with_tail = change([row, row], rate), change([longer], rate)
        by_targets = with_tail < 0.75 * alone
        weighs = not by_targets and -0.75 * alone < change([row], rate, -0.5) < -0.25 * alone
        return cls(by_targets, by_rows=twice < 1.5 * alone, weighs=weighs)


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> tinker.Datum:
    """A row with a loss's inputs: one value for each token but the first, which the row predicts."""

    def tensor(values: Sequence[float], dtype: Literal["int64", "float32"]) -> tinker.TensorData:
        return tinker.TensorData(data=[*values], dtype=dtype, shape=[len(values)])

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            **{name: tensor(values, "float32") for name, values in inputs.items()},
        },
    )


def unique(policy: str, version: int) -> str:
    """A name at the service; a version that is trained again after a resume has other weights."""
    return f"agl-{re.sub('[^a-zA-Z0-9_-]', '-', policy)}-{version}-{uuid.uuid4().hex[:8]}"
