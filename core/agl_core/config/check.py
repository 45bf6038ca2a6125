"""The check that the chosen parts of a run go together, before anything starts: no setting is silently ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from agl_core import kinds
from agl_core.config.resolve import ChosenComponent, LoadedConfig, PolicyPlan
from agl_core.errors import CapabilityError
from agl_core.kinds import Capability, Component, Kind
from agl_core.types import CreditKind

_WHY_NOT = {
    CreditKind.REWARD: (
        "rewards of one step each: the time axis has no owner, and nothing would add up what came after a step"
    ),
    CreditKind.RETURN: "returns, which already contain what came after a step: a return would be counted twice",
    CreditKind.ADVANTAGE: (
        "advantages, which are used as they are: whatever it does with values, a critic or a deviation to divide by, "
        "would have no effect"
    ),
}
"""Why an algorithm cannot take what a credit rule yields."""

_OF_THE_ENGINE = {
    Capability.REFERENCE: "a reference model",
    Capability.CRITIC: "a critic",
    Capability.TARGET_KL: "an update that ends at a target KL",
    Capability.TOKEN_IDS: "token ids",
    Capability.TEACHER: "a teacher's log-probabilities",
    Capability.RESCORE: "log-probabilities before the update for its advantages",
    Capability.RECORDED_TEXTS: "an engine that trains on recorded texts",
}


def check(loaded: LoadedConfig) -> None:
    """CapabilityError with everything among the parts read that does not go together, and what to do about each."""
    policies_of: dict[str, list[str]] = {}
    for policy, plan in loaded.policies.items():
        for check_one in (_groups, _temperature, _time_axis, _tool_results, _engine, _demonstrations):
            for problem in check_one(loaded, plan):
                policies_of.setdefault(problem, []).append(policy)
    problems = [*_sizes(loaded), *(f"{_of(policies, loaded)}{text}" for text, policies in policies_of.items())]
    if problems:
        raise CapabilityError("\n  ".join(["The parts of this run do not go together:", *problems]))


def cautions(loaded: LoadedConfig) -> Iterator[str]:
    """Warnings about what works, and may still surprise."""
    staleness = loaded.config.asynchronous.max_staleness
    uncorrected = [policy for policy, plan in loaded.policies.items() if not corrects_staleness(plan)]
    if staleness and uncorrected:
        yield (
            f"caution: {_of(uncorrected, loaded)}[async] max_staleness is {staleness}, but importance_cap is not "
            f"set, so what older weights sampled is trained on as if today's had (2 is usual)"
        )


def corrects_staleness(plan: PolicyPlan) -> bool:
    """True if importance weights are on, or the algorithm has no such setting."""
    return bool(getattr(plan.algorithm.options, "importance_cap", True))


def _of(policies: Sequence[str], loaded: LoadedConfig) -> str:
    """The policies' names for a message, if the run has several."""
    if len(loaded.policies) == 1:
        return ""
    named = " and ".join(f"'{policy}'" for policy in policies)
    return f"{'policy' if len(policies) == 1 else 'policies'} {named}: "


def _parts(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[ChosenComponent]:
    yield from (plan.algorithm, plan.credit, loaded.store, *loaded.rewards.values())
    if loaded.is_whole:
        yield from (loaded.engine, *loaded.tasks.values(), *loaded.trackers.values())


def needing(loaded: LoadedConfig, plan: PolicyPlan, need: Capability) -> Iterator[ChosenComponent]:
    """The parts that need this, of those that train one policy."""
    return (chosen for chosen in _parts(loaded, plan) if need in chosen.needs)


def _sizes(loaded: LoadedConfig) -> Iterator[str]:
    settings, train = loaded.config.asynchronous, loaded.config.train
    for table, name, value in (("async", "max_staleness", settings.max_staleness), ("train", "refill", train.refill)):
        if value and train.deterministic:
            yield (
                f"[train] deterministic is on, but with [{table}] {name} {value} the order in which rollouts end "
                f"decides what is trained on. Set {name} to 0, or deterministic to false."
            )
    if train.refill and train.group_size == 1:
        yield (
            "[train] refill replaces groups whose returns are all equal, but group_size is 1, so all are. Set refill "
            "to 0, or group_size to 2 or more."
        )
    if loaded.config.eval.patience and (not loaded.config.eval.every or loaded.config.tasks.keys() == {"train"}):
        yield (
            "[eval] patience counts evaluations, and there is none. Name held-out tasks ([tasks.eval]) and set every "
            "to 1 or more, or patience to 0."
        )
    if settings.in_flight is not None and settings.in_flight < train.groups_per_step:
        yield (
            f"[async] in_flight is {settings.in_flight}, but a step needs {train.groups_per_step} groups "
            f"([train] groups_per_step). Set it to {train.groups_per_step} or more."
        )
    if (settings.in_flight or 0) > train.groups_per_step and not settings.max_staleness:
        yield (
            f"[async] in_flight is {settings.in_flight}, but with max_staleness 0 a step is made of the "
            f"{train.groups_per_step} groups that were begun after the last one. Set max_staleness to 1 or more."
        )


def _groups(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    if loaded.config.train.group_size == 1:
        for chosen in needing(loaded, plan, Capability.GROUPS):
            yield (
                f"{chosen.label} compares several rollouts of each task, but [train] group_size is 1. "
                f"Set it to 2 or more (8 is usual)."
            )


def _temperature(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    temperature = loaded.config.sampling.temperature
    for chosen in needing(loaded, plan, Capability.UNIT_TEMPERATURE):
        if temperature != 1:
            yield (
                f"{chosen.label} has log-probabilities from a server, which are those at temperature 1, but "
                f"[sampling] temperature is {temperature:g}. Set it to 1, or choose what computes them here."
            )


def _time_axis(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    """Exactly one of the credit rule and the algorithm adds up what came after a step, and compares."""
    algorithm, credit, taken = plan.algorithm, plan.credit, plan.algorithm.takes
    if taken and not taken & credit.yields:
        words = " or ".join(f"{kind}s" for kind in sorted(taken, reverse=True))

        def fits(rule: Component) -> bool:
            return bool(taken & ChosenComponent.by_default(rule).yields)

        why = _WHY_NOT[min(credit.yields)]
        others = _others(loaded, kinds.CREDIT, f"yields {words}", fits)
        yield f"{algorithm.label} takes {words}, but {credit.label} yields {why}. {others}, or another algorithm."


def _tool_results(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    counting = [chosen.label for chosen in _parts(loaded, plan) if Capability.TOOL_RESULTS in chosen.component.provides]
    if len(counting) > 1:
        yield f"{' and '.join(counting)} each count tool results, so a tool result would count twice. Keep one of them."


def _engine(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    if not loaded.is_whole:
        return
    engine = loaded.engine
    for need, in_words in _OF_THE_ENGINE.items():
        for chosen in needing(loaded, plan, need):
            if chosen is not engine and need not in engine.component.provides:
                others = _others(loaded, kinds.ENGINE, f"provides {need}", lambda it, need=need: need in it.provides)  # type: ignore[misc]
                yield (
                    f"{chosen.label} needs {in_words}, which {engine.label} does not provide. {others}, or change the "
                    f"settings of the {chosen.component.kind}."
                )


def _demonstrations(loaded: LoadedConfig, plan: PolicyPlan) -> Iterator[str]:
    """Replies to imitate are recorded, for a policy learns nothing from its own. Held-out ones are scored."""
    recorded = {name: Capability.DEMONSTRATIONS in source.component.provides for name, source in loaded.tasks.items()}
    held_out = [name for name, is_recorded in recorded.items() if is_recorded and name != "train"]
    if held_out and loaded.is_whole and Capability.RECORDED_TEXTS not in loaded.engine.component.provides:
        others = _others(loaded, kinds.ENGINE, "scores them", lambda it: Capability.RECORDED_TEXTS in it.provides)
        yield (
            f"[tasks.{held_out[0]}] is of recorded rollouts, whose replies {loaded.engine.label} does not score. "
            f"{others}, or leave that set out."
        )
    source = loaded.tasks.get("train")
    for chosen in needing(loaded, plan, Capability.DEMONSTRATIONS):
        if source is not None and not recorded["train"]:
            yield (
                f"{chosen.label} imitates recorded rollouts, but {source.label} has the agent make new ones, so the "
                f"policy would imitate itself. Train on a recorded run (agl train CONFIG --from RUN, which is [tasks."
                f"train] source = \"recorded\"), or imitate the best of the policy's own rollouts (algorithm 'rft')."
            )


def _others(loaded: LoadedConfig, kind: Kind, does: str, able: Callable[[Component], bool]) -> str:
    names = sorted(name for name, component in loaded.plugins.components(kind).items() if able(component))
    return f"Choose one that {does} ({', '.join(names) or 'none is installed'})"
