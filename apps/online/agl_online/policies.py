"""Versions of policies by name: what an engine loads of them, exporting them, and serving them.

Names are `calc@40`, `calc@latest`, `calc@best` and `calc@stable`. The first part is the run's folder: a path, or a
name below ./runs. In a run with several policies the policy's name follows after a colon: `debate:solver@40`. Step 0 is
what training started from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version as installed
from pathlib import Path

import orjson
from starlette.datastructures import URL
from starlette.requests import Request

from agl_core import kinds
from agl_core.apis.errors import ApiError
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.config.resolve import ChosenComponent
from agl_core.config.sections import HUB_NAME, ServerSection
from agl_core.errors import ConfigError, ServerError
from agl_core.kinds import Capability
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, EngineContext, PolicySpec
from agl_core.store import Store
from agl_core.types import Attempt, Call, Mode, Rollout, RolloutState, Task
from agl_core.wire import WORKER_KEY, problem_of_key
from agl_server.gateway.attempts import ActiveAttempt, RolloutSource
from agl_server.http.keys import Keys, carries, is_loopback, refused_key
from agl_server.reading.runs import find_run, policy_names
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints, RunState, read_state
from agl_server.training.run import run_settings

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights that a run made, or, with step 0, started from."""

    run: Path
    policy: str
    step: int
    checkpoint: Path | None
    """None: what training started from."""

    @classmethod
    def find(cls, text: str) -> Version:
        """The version that a name means now; without `@` the latest. An AglError says if there is none."""
        name, at, which = text.rpartition("@")
        run, policy = find_policy(name if at else text)
        checkpoint = Checkpoints(run / CHECKPOINTS, keep=1).meant_by(which if at else "latest")
        return cls(run, policy, 0 if checkpoint is None else read_state(checkpoint).step, checkpoint)

    def __str__(self) -> str:
        return f"{name_of(self.run, self.policy)}@{self.step}"

    @property
    def saved(self) -> Path | None:
        """The folder with the weights as transformers, or peft for an adapter, loads them."""
        return None if self.checkpoint is None else self.checkpoint / self.policy / "model"

    @property
    def is_adapter(self) -> bool:
        """True if an adapter of other weights was saved."""
        return self.saved is not None and (self.saved / _ADAPTER).is_file()


def find_policy(name: str) -> tuple[Path, str]:
    """The run's folder and the policy that a name without a version means. ConfigError if there is none."""
    before, _, policy = name.rpartition(":")
    run = find_run(Path(before or name))
    known = policy_names(run)
    if before and policy in known:
        return run, policy
    if before or len(known) != 1:
        raise ConfigError(
            f"'{name}' names no policy of {run}. It trains {', '.join(known) or 'none: it is a recording'}; of "
            f"several, one is named as {run.name}:POLICY."
        )
    return run, known[0]


def name_of(run: Path, policy: str) -> str:
    """The name of a policy: its run's name, and after a colon its own where the run has several."""
    name = run.resolve().name
    return name if len(policy_names(run)) == 1 else f"{name}:{policy}"


def load_run(run: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The configuration of a run, as far as its policies need it; `KEY=VALUE` texts override it."""
    return load(run / CONFIG_FILE, overrides, needs=(), plugins=Plugins.load())


def policy_spec(version: Version, loaded: LoadedConfig) -> PolicySpec:
    """The spec by which an engine loads a version of this run. ConfigError if the weights below an adapter are gone."""
    model = loaded.config.policies[version.policy].model
    saved = None if version.saved is None else str(version.saved.resolve())
    if saved is None or version.is_adapter:
        weights, adapter = loaded.weights(version.policy), saved
    else:
        weights, adapter = saved, None
    return PolicySpec(
        weights, model.dtype, model.trust_remote_code, name=model.path, adapter=adapter, version=version.step
    )


def make_engine(loaded: LoadedConfig, folder: Path) -> Engine:
    """An engine that logs to `folder`: the run's, else any that is installed. ConfigError if none serves policies."""
    chosen = loaded.single["engine"]
    if chosen is None or Capability.POLICIES not in chosen.component.provides:
        engines = loaded.plugins.components(kinds.ENGINE).values()
        component = next((engine for engine in engines if Capability.POLICIES in engine.provides), None)
        if component is None:
            raise ConfigError("No engine is installed here that serves policies without a run. Install agl-torch.")
        table = loaded.config.engine.settings.get(component.name, {})
        chosen = ChosenComponent(component, component.options.model_validate(table))
    context = EngineContext(folder, loaded.config.seed, {}, False, (), api_key=os.urandom(16).hex())
    engine: Engine = chosen.build(context)
    return engine


def export(version: Version, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Write a version as it was saved: all weights, or its adapter, which names its base as it is found here.

    The folder appears whole or not at all. ConfigError if it exists, the adapter's base is gone, or for step 0.
    """
    if version.saved is None or version.checkpoint is None:
        raise ConfigError(f"{version} is what training started from, which nothing has to be written of.")
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists. Remove it, or name another folder with --out.")
    loaded = load_run(version.run, overrides)
    base = loaded.weights(version.policy) if version.is_adapter else None
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(version.saved, part, copy_function=shutil.copyfile)
        if base is not None:
            described = orjson.loads((part / _ADAPTER).read_bytes()) | {"base_model_name_or_path": base}
            (part / _ADAPTER).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2))
        (part / "README.md").write_text(_model_card(version, read_state(version.checkpoint), loaded), encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _model_card(version: Version, state: RunState, loaded: LoadedConfig) -> str:
    """The folder's README.md, with the front matter that the Hugging Face hub reads."""
    base = loaded.config.policies[version.policy].model.path
    is_public = HUB_NAME.fullmatch(base) is not None and not Path(base).exists()
    front = [f"base_model: {base}"] if is_public else []
    front += [f"library_name: {'peft' if version.is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    contents = "A LoRA adapter: it needs its base model." if version.is_adapter else "All weights."
    algorithm = (state.config["policies"][version.policy].get("algorithm") or state.config["algorithm"])["name"]
    run = version.run.resolve().name
    lines = [
        "---",
        *front,
        "tags:",
        "- agl",
        "- reinforcement-learning",
        "---",
        "",
        f"# {version}",
        "",
        f"{contents} agl {installed('agl-core')} trained it with {algorithm}, in the run `{run}`.",
        "The licence of the base model is that of the base model's own card.",
    ]
    return "\n".join(lines) + "\n"


POLICY_KEY = "AGL_POLICY_KEY"
"""The environment variable with the key that clients of served policies need."""


class _UnrecordedAttempt(ActiveAttempt):
    async def keep(self, store: Store, *calls: Call) -> None:
        return


class PolicyClients(RolloutSource):
    """Answers calls with `key`; without a key, to this machine's own names: a web page could know another one."""

    def __init__(self, key: str | None) -> None:
        rollout = Rollout("served", "served", 0, "served", Task("served", None), Mode.USE, 0, 0, RolloutState.RUNNING)
        self._attempt = _UnrecordedAttempt(rollout, Attempt("served", 0, "served", started=0.0))
        self._key = key

    async def attempt_of(self, request: Request) -> ActiveAttempt:
        """The same for all. ApiError 401 without the key, 403 for another name if there is no key."""
        names = [f"http://{request.headers.get('host', '')}", request.headers.get("origin", "http://localhost")]
        if self._key is not None and not carries(request, self._key):
            raise refused_key(request, f"It is the value of {POLICY_KEY} where `agl policy serve` was started.")
        if self._key is None and not all(is_loopback(URL(name).hostname or "") for name in names):
            raise ApiError(
                403,
                f"Without a key, served policies answer only to this machine's own names, such as 127.0.0.1. Start "
                f"`agl policy serve` with {POLICY_KEY} set, and send its value.",
                code="foreign_name",
            )
        return self._attempt


@asynccontextmanager
async def serving(
    names: Sequence[str], *, host: str, port: int, key: str | None, overrides: Sequence[str] = ()
) -> AsyncIterator[tuple[str, Engine]]:
    """Serve versions by these names until the block ends; yields the address and the engine that has them all.

    ServerError if others can reach `host` without a key. `overrides` are for the configurations of the runs.
    """
    if key is not None and (problem := problem_of_key(POLICY_KEY, key)):
        raise ServerError(problem)
    if key is None and not is_loopback(host):
        raise ServerError(
            f"Policies are not served on {host}, where other machines can reach them, without a key. Set {POLICY_KEY} "
            f"here (`openssl rand -hex 24` makes one), which clients send as their API key, or use host 127.0.0.1."
        )
    versions = {name: Version.find(name) for name in names}
    configs = {version.run: load_run(version.run, overrides) for version in versions.values()}
    first = next(iter(configs.values()))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-policy-")))
        store = await stack.enter_async_context(SqliteStore(folder / "store.sqlite"))
        engine = make_engine(first, folder)
        stack.push_async_callback(engine.stop)
        upstream = replace(await engine.start(), models={name: name for name in names})
        for name, version in versions.items():
            await engine.load_policy(name, policy_spec(version, configs[version.run]))
        server = LightningServer(
            store,
            upstream,
            replace(run_settings(first.config), agents={}),
            Plugins().hook,
            listen=ServerSection(host=host, port=port),
            # The host was checked; nobody has the keys of workers here.
            keys=Keys(chosen=frozenset({WORKER_KEY})),
            source=PolicyClients(key),
        )
        await stack.enter_async_context(server)
        yield server.base_url, engine
