"""The keys of a run's TOML file. Every key has a type, bounds, a default and a line of description."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator

from agl_core.config.sections import (
    FOLDER_NAME,
    GatewaySection,
    OpenSection,
    PluginChoice,
    PolicySection,
    Section,
    ServerSection,
    is_among,
)
from agl_core.types import AlarmName, Ending, Mode


class AgentSection(Section):
    """The agent to train."""

    entry: str | None = None
    """The agent as 'module:function'; the module may be beside this file."""
    command: str | tuple[str, ...] | None = None
    """Instead of entry: a program that is run for each rollout, with its task in AGL_TASK (JSON). Its result is the
    last line that it prints if that is JSON, else all that it prints. It works in an empty folder of its own, which is
    removed afterwards; arguments that name a file beside this one are made absolute (docs/security.md)."""
    harness: str | None = None
    """Instead of both: a program that is known by name, such as 'codex'; the task's input is its prompt."""
    options: dict[str, Any] | None = None
    """The settings of the harness."""
    attach: bool = True
    """Attach every installed adapter to the frameworks that the agent imports."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if sum(way is not None for way in (self.entry, self.command, self.harness)) != 1:
            raise ValueError("needs one of entry = 'module:function', command = 'a program' and harness = 'its name'")
        if self.options and self.harness is None:
            raise ValueError("has options, which are a harness's, and names none")
        if self.entry is not None and not all(self.entry.partition(":")):
            raise ValueError("entry must be 'module:function', for instance 'my_agent:solve'")
        words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        if words is not None and not (words and words[0]):
            raise ValueError("command must name a program, for instance 'python agent.py'")
        return self


class TaskSection(OpenSection):
    """One set of tasks: the plugin that makes them, and its settings."""

    source: str
    """The task source plugin, for instance 'jsonl'."""


class PartSection(TaskSection):
    """One part of a mixture: a task source with its settings, and its weight."""

    weight: float = Field(1.0, gt=0)
    """Its share of the tasks, beside the weights of the other parts."""


class MixtureOptions(Section):
    """The parts of the task source `mixture`."""

    parts: dict[str, PartSection] = Field(min_length=1)
    """Task sources by a name of your choice."""


class SamplingSection(Section):
    """How replies are sampled; the rollout's mode decides, not the agent's code."""

    temperature: float = Field(1.0, gt=0)
    """In training and in eval-sampled; eval-greedy takes the most probable token."""
    max_tokens: int = Field(1024, ge=1)
    """Limit of a response if the agent sets none."""


EndingReward: TypeAlias = float | Literal["drop", "score"]

_ENDINGS: Mapping[Ending, EndingReward] = {
    Ending.FINISHED: "score",
    **dict.fromkeys((Ending.CRASHED, Ending.TIMED_OUT, Ending.CONTEXT_OVERFLOW), 0.0),
    **dict.fromkeys((Ending.NO_CALL, Ending.CANCELLED, Ending.LOST), "drop"),
}


class StopSection(Section):
    """When training ends before its last step."""

    tokens: int = Field(0, ge=0)
    """Training ends after so many, of all kinds that the engine counts, evaluations included; 0: never."""


class TrainSection(Section):
    """The training loop."""

    steps: int = Field(100, ge=1)
    """Updates to make."""
    groups_per_step: int = Field(16, ge=1)
    """Tasks per step; each makes one group of rollouts."""
    group_size: int = Field(8, ge=1)
    """Rollouts of each task."""
    refill: int = Field(0, ge=0)
    """Groups that a step replaces by fresh ones, at most, because their rollouts' returns are all equal: nothing would
    be learned from them (DAPO's dynamic sampling). As many as groups_per_step are usual."""
    agents: tuple[str, ...] = ("*",)
    """Names or patterns of the agents to train; calls of other agents count only in the return."""
    housekeeping: Literal["drop", "keep"] = "drop"
    """Calls that a program makes for itself, for a title, say. drop: no rule sees them and none is trained on; keep:
    they are calls like others."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Responses that the token limit cut off. keep: trained on like others; mask: out of the loss, while their rewards
    are compared with the group's (DAPO's overlong filtering); drop: their rollouts leave the group."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints. A step with the best evaluation so far has one too."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are removed, but for the one with the best evaluation."""
    deterministic: bool = False
    """Bit-exact repetition and resuming, at a cost in speed."""
    endings: dict[Ending, EndingReward] = Field(dict(_ENDINGS))
    """For each ending of a rollout: 'score' by the reward rules, a fixed terminal reward, or 'drop'."""
    stop: StopSection = StopSection()

    @field_validator("endings")
    @classmethod
    def _all_endings(cls, value: dict[Ending, EndingReward]) -> dict[Ending, EndingReward]:
        return {**_ENDINGS, **value}


class AsyncSection(Section):
    """Training that does not wait for its slowest rollouts (docs/asynchronous.md).

    A run without this table waits: its `max_staleness` is 0.
    """

    max_staleness: int = Field(4, ge=0, le=1000)
    """How many updates old the weights that answered an episode's oldest call may be. Older episodes are dropped. 0:
    each step waits for all its rollouts, as in a run without [async]."""
    in_flight: int | None = Field(None, ge=1)
    """Groups under way at most, including complete ones that wait for an update; absent: groups_per_step ·
    (max_staleness + 1)."""


class EvalSection(Section):
    """Evaluation with the same agent, workers, gateway and store as training."""

    every: int = Field(20, ge=0)
    """Steps between evaluations; there is one before and one after training. 0: `agl train` does not evaluate."""
    tasks: int = Field(200, ge=1)
    """Tasks per evaluation set, from its start."""
    modes: tuple[Mode, ...] = (Mode.EVAL_GREEDY, Mode.EVAL_SAMPLED)
    """How to sample."""
    patience: int = Field(0, ge=0)
    """Training ends after this many evaluations in a row without a new best reward, on the set `eval` (else the first
    one) in the first of `modes`; 0: never."""

    @field_validator("modes")
    @classmethod
    def _evaluating(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if not value or not all(mode.evaluates for mode in value):
            raise ValueError("must name 'eval-greedy', 'eval-sampled' or both")
        return value


class WorkerSection(Section):
    """The workers that run the agent."""

    concurrency: int | None = Field(None, ge=1)
    """Rollouts run at the same time, by the trainer's workers together and by each `agl worker`; absent: 128 as tasks,
    32 as processes (see `isolation`), four for each core as a harness's programs."""
    processes: int | None = Field(None, ge=0)
    """Worker processes that `agl train` starts beside itself for an async agent; absent: one for each core, at most 16.
    1: the agent runs in the trainer's own process. 0: leave all rollouts to `agl worker`."""
    isolation: Literal["auto", "process"] = "auto"
    """process: each attempt has its own process, which is ended with everything that it started when its time is up;
    auto: so it is for commands, sync agents, and with memory_mib; async agents run as tasks in the worker's event loop.
    A warning names an agent that blocks that loop: set process for it."""
    memory_mib: int | None = Field(None, ge=64)
    """MiB of memory that an attempt's process, or any that it starts, may ask for (Linux)."""
    timeout: float = Field(120.0, gt=0)
    """Seconds an attempt may take."""
    attempts: int = Field(2, ge=1)
    """Tries per rollout; an attempt is tried again only if it was lost, or failed before any LLM call."""


class PromptSection(Section):
    """A prompt of the agent, which `agl_core.prompt` gets by this name in rollouts (docs/how-to/prompts.md)."""

    text: str | None = None
    """The prompt; absent: what the agent itself has."""
    replace: str | None = Field(None, min_length=1)
    """For agents that do not ask for it: the words in their system messages that the gateway replaces by `text`."""
    agents: tuple[str, ...] = ("*",)
    """Names or patterns of the agents in whose calls it is replaced."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.text is None and self.replace is None:
            raise ValueError("needs a text, or what it is to replace")
        if self.replace is None and self.agents != ("*",):
            raise ValueError("agents says in whose calls `replace` is replaced, and there is no `replace`")
        return self


class RewardSection(OpenSection):
    """One reward rule; its settings are beside these keys."""

    rule: str | None = None
    """The reward plugin; by default the table's own name."""
    weight: float = 1.0
    """Its share in the terminal reward."""
    modes: tuple[Mode, ...] = Field((Mode.TRAIN, Mode.EVAL_GREEDY, Mode.EVAL_SAMPLED), min_length=1)
    """The modes of the rollouts that it scores; 'use': those that are opened from outside the run."""
    time_limit: float | None = Field(None, gt=0, le=86_400)
    """Seconds that it may take for a rollout, or to compare a group; by default 60, of an isolated rule 10, of an async
    one 600."""


_VARIABLE = re.compile(r'"\w+_env":"([^"]+)"')
"""In a configuration as JSON, the environment variable that a setting names."""


class RunConfig(Section):
    """A whole run. Tables that are not among these belong to plugins (`agl_core.kinds.CONFIG_TABLE`)."""

    model_config = ConfigDict(serialize_by_alias=True, extra="allow")

    config_version: Literal[1]
    """The version of this format."""
    name: str = Field("run", pattern=f"^{FOLDER_NAME.pattern}$")
    """The run's folder below `runs`."""
    runs: Path = Path("runs")
    """The folder of run folders, relative to the working directory."""
    seed: int = Field(0, ge=0)
    """Seed of all random choices."""
    folder: Path = Path()
    """The folder where relative paths and the agent's module start, relative to this file."""
    plugins: tuple[Path, ...] = ()
    """Your own plugin files, relative to this file."""
    agent: AgentSection | None = None
    """The agent; it may be absent if training is on recorded rollouts and nothing is evaluated."""
    tasks: dict[str, TaskSection]
    """'train', and any number of held-out sets; the headline reports 'eval'."""
    policies: dict[str, PolicySection]
    """The models to train, by name (letters, digits, '.', '_' and '-'); 'default' if there is one."""
    sampling: SamplingSection = SamplingSection()
    train: TrainSection = TrainSection()
    asynchronous: AsyncSection = Field(AsyncSection(max_staleness=0), alias="async")
    eval: EvalSection = EvalSection()
    workers: WorkerSection = WorkerSection()
    server: ServerSection = ServerSection()
    gateway: GatewaySection = GatewaySection()
    prompts: dict[str, PromptSection] = Field(default_factory=dict)
    """The agent's prompts, by name; or a file with these tables, such as `agl optimize` writes."""
    rewards: dict[str, RewardSection] = Field(default_factory=dict)
    """Reward rules; without any, the reward is what the agent itself reports."""
    credit: PluginChoice = PluginChoice(name="identical")
    """How an episode's rewards are shared among its transitions."""
    algorithm: PluginChoice = PluginChoice(name="grpo")
    """The algorithm that computes advantages from credited rewards, and the loss."""
    engine: PluginChoice = PluginChoice(name="torch")
    """The engine that holds, serves and trains the weights."""
    store: PluginChoice = PluginChoice(name="sqlite")
    """The store that records everything that happens."""
    alarms: dict[AlarmName, Annotated[float, Field(gt=0)] | Literal[False]] = Field({})
    """Thresholds of alarms by their names, instead of those in docs/health.md; `no_contrast = false` switches that one
    off."""
    trackers: dict[str, dict[str, Any] | Literal[False]] = Field({})
    """Trackers by plugin name, with their settings. A run also has TensorBoard if it is installed; `tensorboard =
    false` leaves it out."""

    @property
    def plugin_files(self) -> tuple[Path, ...]:
        """`plugins` as absolute paths: relative ones start at `folder`."""
        return tuple((self.folder / file.expanduser()).resolve() for file in self.plugins)

    def secret_variables(self, environment: Iterable[str]) -> set[str]:
        """The variables that an agent may not have: those that a setting `*_env` names, and trackers' (`WANDB_*`)."""
        trackers = tuple(f"{name.upper()}_" for name, options in self.trackers.items() if options is not False)
        return {
            *_VARIABLE.findall(self.model_dump_json()),
            *(name for name in environment if name.startswith(trackers)),
        }

    def as_file(self) -> dict[str, Any]:
        """The tables as a file has them; there are no tasks and policies where it names none."""
        left_out = {name for name in ("tasks", "policies") if not getattr(self, name)}
        return self.model_dump(mode="json", exclude_none=True, exclude=left_out)

    @field_validator("tasks")
    @classmethod
    def _has_train(cls, value: dict[str, TaskSection]) -> dict[str, TaskSection]:
        if "train" not in value:
            raise ValueError("needs the table [tasks.train]")
        return value

    @field_validator("alarms")
    @classmethod
    def _have_thresholds(
        cls, value: dict[AlarmName, float | Literal[False]]
    ) -> dict[AlarmName, float | Literal[False]]:
        for name, threshold in value.items():
            if threshold is not False and not name.has_threshold:
                raise ValueError(f"the alarm '{name}' has no threshold: it can only be switched off ({name} = false)")
        return value

    @field_validator("rewards")
    @classmethod
    def _is_not_the_agent(cls, value: dict[str, RewardSection]) -> dict[str, RewardSection]:
        if "agent" in value:
            raise ValueError(
                "a table cannot be called 'agent', the source of what the agent itself reports: choose another name, "
                "and name the rule by `rule`"
            )
        return value

    @field_validator("policies")
    @classmethod
    def _is_named_and_not_shadowed(cls, value: dict[str, PolicySection]) -> dict[str, PolicySection]:
        if not value:
            raise ValueError("needs a policy, for instance [policies.default]")
        taken: dict[str, tuple[str, ...]] = {}
        for name, policy in value.items():
            if not FOLDER_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be a policy's name: its checkpoint is in a folder of this name. Use letters, "
                    f"digits, '.', '_' and '-', and begin with a letter or a digit"
                )
            if name != "default" and not policy.agents and get_close_matches(name, ["default"], cutoff=0.8):
                raise ValueError(
                    f"'{name}' has no `agents`, and is almost 'default', the policy of every agent that no other one "
                    f"names. Did you mean [policies.default]? Else give it `agents`"
                )
            for agent in policy.agents:
                for earlier, patterns in taken.items():
                    if agent in patterns or (not set(agent) & set("*?[") and is_among(agent, patterns)):
                        raise ValueError(
                            f"{agent!r} in the agents of '{name}' has no effect: the agents of '{earlier}', which "
                            f"comes first, cover it. Put [policies.{name}] first, or take it out of one of them"
                        )
            taken[name] = policy.agents
        return value


class UntrainedConfig(RunConfig):
    """A configuration that names no tasks and no models, for what tables of plugins say."""

    tasks: dict[str, TaskSection] = Field(default_factory=dict)
    policies: dict[str, PolicySection] = Field(default_factory=dict)
