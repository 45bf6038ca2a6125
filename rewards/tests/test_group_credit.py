"""Credit rules that yield advantages: what they conserve, and that a tool which always succeeds earns nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_core import kinds
from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import Episode, Reward, ToolResult, ToolStatus, Transition, episode_return
from agl_rewards.air import MALFORMED, tool_terms
from agl_rewards.group_credit import gigpo

from .conftest import rule as make_rule

RETURNS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1])


@dataclass(frozen=True)
class Step:
    """A call: its place in the world, its reward, and the tools that it asked for with their statuses."""

    room: int = 0
    reward: float = 0.0
    tools: tuple[tuple[str, ToolStatus], ...] = ()
    parses: bool = True

    agent: str = "solver"


OFFERED = ("look", "fetch", "bell")
STATUSES = st.sampled_from(ToolStatus)
TOOLS = st.lists(st.tuples(st.sampled_from(["look", "fetch"]), STATUSES), max_size=3).map(tuple)
STEPS = st.builds(Step, st.integers(0, 3), RETURNS, TOOLS, st.sampled_from([True, True, False]))
MEMBERS = st.lists(st.tuples(st.lists(STEPS, min_size=1, max_size=5), RETURNS), min_size=1, max_size=5)


def rollout(member: int, steps: Sequence[Step], terminal: float) -> Episode:
    return make.episode(
        *(_transition(f"r{member}", turn, step) for turn, step in enumerate(steps)),
        rollout=f"r{member}",
        member=member,
        terminal=terminal,
    )


def _transition(name: str, turn: int, step: Step) -> Transition:
    results = [
        ToolResult(f"{turn}.{n}", name, 0, tool, status, tool_call_id=f"{turn}.{n}")
        for n, (tool, status) in enumerate(step.tools)
    ]
    return make.transition(
        turn,
        *results,
        rollout=name,
        agent=step.agent,
        tools=tuple({"type": "function", "function": {"name": tool}} for tool in OFFERED),
        response={
            "role": "assistant",
            "tool_calls": [{"id": f"{turn}.{n}", "function": {"name": tool}} for n, (tool, _) in enumerate(step.tools)],
        },
        rewards=(Reward(name, 0, "step", step.reward, "test", f"{name}-c{turn}"),),
        prompt_ids=np.array([7, step.room], np.int32),
        state={"room": step.room, "turn": turn},
        parse_error=None if step.parses else "no closing brace",
    )


def group(members: Sequence[tuple[Sequence[Step], float]]) -> list[Episode]:
    return [rollout(i, steps, terminal) for i, (steps, terminal) in enumerate(members)]


def relative_returns(episodes: Sequence[Episode]) -> list[list[float]]:
    """The advantages of whole rollouts, by the standard library's deviation."""
    totals = [episode_return(episode) for episode in episodes]
    spread = stdev(totals) if len(totals) > 1 else 0.0
    values = [(total - fmean(totals)) / (spread + 1e-6) if spread > 1e-9 else 0.0 for total in totals]
    return [[value] * len(episode.transitions) for episode, value in zip(episodes, values, strict=True)]


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-9)


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for of_episode in values for value in of_episode]


def visits(episodes: Sequence[Episode], values: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """The values of all calls by room."""
    by_room = defaultdict[int, list[float]](list)
    for episode, of_episode in zip(episodes, values, strict=True):
        for transition, value in zip(episode.transitions, of_episode, strict=True):
            by_room[transition.state["room"]].append(value)  # type: ignore[index,arg-type]
    return by_room


AirRule = Callable[..., Any]


@pytest.fixture(scope="module", name="air")
def air_fixture() -> AirRule:
    return lambda group, **settings: make_rule(kinds.CREDIT, "air", **settings)(group)


class TestAir:
    @given(members=MEMBERS, beta=st.sampled_from([0.0, 0.3, 2.0]))
    def test_it_is_the_episodes_advantage_and_its_tools(
        self, air: AirRule, members: list[tuple[list[Step], float]], beta: float
    ) -> None:
        episodes = group(members)
        plain, values = relative_returns(episodes), air(episodes, beta=beta)
        terms = [[sum(of_call.values()) for of_call in of_episode] for of_episode in tool_terms(episodes)]
        expected = [z + beta * term for z, term in zip(flat(plain), flat(terms), strict=True)]
        assert flat(values) == near(expected)

    @given(members=MEMBERS)
    def test_over_a_group_the_terms_of_each_tool_sum_to_zero_and_each_is_bounded(
        self, members: list[tuple[list[Step], float]]
    ) -> None:
        totals = defaultdict[str, float](float)
        for of_episode in tool_terms(group(members)):
            for terms in of_episode:
                for tool, term in terms.items():
                    totals[tool] += term
                    assert abs(term) <= 2
        assert [*totals.values()] == near([0.0] * len(totals))

    @given(members=MEMBERS, status=STATUSES)
    def test_a_tool_with_one_status_everywhere_contributes_nothing(
        self, air: AirRule, members: list[tuple[list[Step], float]], status: ToolStatus
    ) -> None:
        constant = [([_with(step, tools=(("bell", status),) * n, parses=True) for n, step in enumerate(steps)], end)
                    for steps, end in members]  # fmt: skip
        assert air(group(constant)) == air(group(constant), beta=0.0)

    @given(members=MEMBERS, data=st.data())
    def test_a_farmed_tool_leaves_the_terms_of_others_as_they_are(
        self, members: list[tuple[list[Step], float]], data: st.DataObject
    ) -> None:
        def farmed(step: Step) -> Step:
            return _with(step, tools=(*step.tools, *[("bell", ToolStatus.OK)] * data.draw(st.integers(0, 9))))

        before = tool_terms(group(members))
        after = tool_terms(group([([farmed(step) for step in steps], end) for steps, end in members]))
        for terms, more in zip(flat(before), flat(after), strict=True):  # type: ignore[arg-type]
            assert more.get("bell", 0.0) == 0.0  # type: ignore[attr-defined]
            kept = {tool: term for tool, term in more.items() if tool in terms and tool != MALFORMED}  # type: ignore[attr-defined]
            assert kept == near({tool: term for tool, term in terms.items() if tool != MALFORMED})  # type: ignore[attr-defined]

    def test_a_tool_call_that_does_not_parse_is_worse_than_one_that_does(self, air: AirRule) -> None:
        works, broken = Step(tools=(("look", ToolStatus.OK),)), Step(parses=False)
        assert air(group([([works, Step()], 0.0), ([broken], 0.0)])) == [[near(0.3), 0.0], [near(-0.3)]]

    @given(members=MEMBERS, data=st.data())
    def test_a_failure_is_not_hidden_by_a_tool_that_was_not_offered(
        self, air: AirRule, members: list[tuple[list[Step], float]], data: st.DataObject
    ) -> None:
        """The same failing call with a name that the model made up is never better than with the tool's own."""
        _, (steps, end) = data.draw(st.sampled_from([*enumerate(members)]))
        rest = [member for member in members if member[0] is not steps]
        values = [
            air(group([([Step(tools=((tool, ToolStatus.ERROR),)), *steps], end), *rest]))[0][0]
            for tool in ("fetch", f"fetch_{data.draw(st.integers(0, 9))}")
        ]
        assert values[1] <= values[0] + 1e-9

    def test_each_made_up_name_fails_and_one_that_works_is_a_tool(self, air: AirRule) -> None:
        tools = [("fetch", ToolStatus.OK), ("fetch_1", ToolStatus.ERROR), ("fetch_2", ToolStatus.EMPTY)]
        values = air(group([([Step(tools=(tool,)) for tool in tools], 0.0)]))
        assert values == [near([0.3 * 4 / 3, 0.3 * -2 / 3, 0.3 * -2 / 3])], "a mean of -1/3 over three calls"
        later = [Step(tools=(("found_by_search", ToolStatus.OK),)), Step(tools=(("fetch", ToolStatus.OK),))]
        assert air(group([(later, 0.0)])) == [[0.0, 0.0]]

    def test_a_made_up_name_is_seen_in_what_was_recorded(self, air: AirRule) -> None:
        def recorded(rollout: str, tool: str, result: str) -> Episode:
            asks = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": tool}}]}
            tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
            answered = [asks, {"role": "tool", "tool_call_id": "c1", "content": result}]
            calls = [
                make.call(0, make.choice(message=asks), rollout=rollout, request={"messages": [], "tools": tools}),
                make.call(1, rollout=rollout, request={"messages": answered, "tools": tools}),
            ]
            return build_episode(make.rollout(rollout), make.attempt(rollout), calls, [])

        episodes = [recorded("a", "look", "22 °C"), recorded("b", "look_2", "Error: there is no tool look_2")]
        assert air(episodes) == [near([0.3, 0.0]), near([-0.3, 0.0])]

    def test_where_no_tools_are_offered_a_made_up_name_is_worth_nothing(self, air: AirRule) -> None:
        """As a call without a tool is: a text agent's tools are not known."""
        steps = [Step(tools=((tool, ToolStatus.ERROR),)) for tool in ("a", "b")]
        [episode] = group([([*steps, Step()], 0.0)])
        unknown = replace(episode, transitions=tuple(replace(t, tools=()) for t in episode.transitions))
        assert air([unknown]) == [[0.0, 0.0, 0.0]]

    @given(members=MEMBERS)
    def test_what_another_agent_fails_at_is_no_reward(
        self, air: AirRule, members: list[tuple[list[Step], float]]
    ) -> None:
        works = Step(tools=(("look", ToolStatus.OK),), agent="planner")
        unrewarded = [[_with(step, reward=0.0) for step in steps] for steps, _ in members]
        values = air(group([([works, *steps, works], 0.0) for steps in unrewarded]))
        assert {value for of_episode in values for value in (of_episode[0], of_episode[-1])} == {0.0}

    @given(count=st.integers(1, 9), status=STATUSES)
    def test_parallel_calls_of_one_tool_earn_what_one_does(self, air: AirRule, count: int, status: ToolStatus) -> None:
        other = [Step(tools=(("look", ToolStatus.OK), ("look", ToolStatus.ERROR)))]
        once, often = (air(group([([Step(tools=(("look", status),) * n)], 0.0), (other, 0.0)])) for n in (1, count))
        assert often == once

    def test_the_choices_of_a_call_share_its_place(self, air: AirRule) -> None:
        """Two choices that work weigh as one that does not."""
        first, second = group([([Step(tools=(("look", ToolStatus.OK),))], 0.0), ([Step()], 0.0)])
        third = group([([Step(tools=(("look", ToolStatus.ERROR),))], 0.0)])[0]
        twice = [replace(first.transitions[0], key=first.transitions[0].key._replace(choice=i)) for i in range(2)]
        assert air([replace(first, transitions=tuple(twice)), second, third]) == [near([0.3, 0.3]), [0.0], near([-0.3])]

    def test_easy_calls_of_a_tool_are_preferred_to_hard_ones(self, air: AirRule) -> None:
        """The limit of a comparison by name: a shell's `echo` and its tests are one tool, until all of them work."""
        echo, tests = Step(tools=(("look", ToolStatus.OK),)), Step(tools=(("look", ToolStatus.ERROR),))
        for share, worth in ((1, 0.3), (3, 0.15), (9, 0.06)):
            assert air(group([([echo] * share + [tests], 0.0)]))[0] == near([worth] * share + [worth - 0.6])
        assert air(group([([echo] * 4, 0.0)])) == [[0.0] * 4]

    def test_the_mixed_form_is_the_papers(self, air: AirRule) -> None:
        ok, error = ("look", ToolStatus.OK), ("look", ToolStatus.ERROR)
        steps = [Step(tools=(ok,)), Step(tools=(ok, error, error)), Step(), Step(parses=False)]
        values = air(group([(steps, 0.5)]), form="mixed", alpha=0.2)
        assert values == [near([0.2 * 1 + 0.8 * 0.5, 0.2 * (-1 / 3) + 0.8 * 0.5, 0.5, 0.2 * -1 + 0.8 * 0.5])]

    @pytest.mark.parametrize(
        "settings", [{"alpha": 0.4}, {"form": "mixed", "beta": 0.1}, {"form": "mixed", "alpha": 1.1}, {"beta": -1.0}]
    )
    def test_settings_without_effect_and_out_of_range_are_refused(self, air: AirRule, settings: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            air([], **settings)


class TestGigpo:
    @given(members=MEMBERS, gamma=st.sampled_from([0.5, 0.95, 1.0]), omega=st.sampled_from([0.0, 1.0, 3.0]))
    @pytest.mark.parametrize("anchor", [(), ("room",)])
    def test_beside_the_episodes_advantage_it_compares_calls_at_a_state(
        self, anchor: tuple[str, ...], members: list[tuple[list[Step], float]], gamma: float, omega: float
    ) -> None:
        episodes = group(members)
        values = gigpo(episodes, omega=omega, gamma=gamma, anchor=anchor)
        terms = [
            [value - z for value, z in zip(*both, strict=True)]
            for both in zip(values, relative_returns(episodes), strict=True)
        ]
        to_go = visits(episodes, [[*_to_go(episode, gamma)] for episode in episodes])
        for room, here in visits(episodes, terms).items():
            assert here == near([omega * (value - fmean(to_go[room])) for value in to_go[room]])
            assert sum(here) == near(0.0)

    @given(members=MEMBERS)
    def test_without_a_shared_state_it_is_identical(self, members: list[tuple[list[Step], float]]) -> None:
        count = iter(range(1000))
        alone = group([([_with(step, room=next(count)) for step in steps], end) for steps, end in members])
        assert flat(gigpo(alone)) == near(flat(relative_returns(alone)))
        without_ids = [replace(e, transitions=tuple(replace(t, prompt_ids=None) for t in e.transitions)) for e in alone]
        assert gigpo(without_ids) == gigpo(alone)
        assert gigpo(group(members), anchor=("floor",)) == relative_returns(group(members))

    def test_the_values_are_those_of_the_authors_own_code(self) -> None:
        """Recorded from verl-agent's `compute_gigpo_outcome_advantage`: its episode part with, its steps without σ."""
        members = [
            ([Step(0), Step(1, 0.5), Step(0), Step(2)], 1.0),
            ([Step(0), Step(2), Step(2)], 0.0),
            ([Step(1, -0.25), Step(3)], 0.5),
        ]
        theirs = [2.283812, 2.318145, 1.519062, 2.473979, -2.247449, -1.392532, -1.392532, -1.59228, -0.41478]
        assert flat(gigpo(group(members), omega=2.0)) == pytest.approx(theirs, abs=1e-6)


class TestToolResults:
    def test_each_call_is_compared_with_the_groups_calls_of_its_tool(self) -> None:
        rule = make_rule(kinds.REWARD, "tool_results", weights={"fetch": 0.5}, default_weight=0.1)
        ok, error, fetch = ("look", ToolStatus.OK), ("look", ToolStatus.ERROR), ("fetch", ToolStatus.OK)
        episodes = group([([Step(tools=(ok,)), Step()], 1.0), ([Step(tools=(error, fetch))], 0.0)])
        first, second = rule.reward(episodes)
        assert [(r.name, r.call, r.value) for r in first] == [("look", "r0-c0", 0.1)]
        assert [(r.name, r.call, r.value) for r in second] == [("look", "r1-c0", -0.1)]

    @given(members=MEMBERS)
    def test_over_a_group_its_rewards_sum_to_zero(self, members: list[tuple[list[Step], float]]) -> None:
        rewards = make_rule(kinds.REWARD, "tool_results").reward(group(members))
        assert sum(reward.value for of_episode in rewards for reward in of_episode) == near(0.0)


def _with(step: Step, **changes: Any) -> Step:
    return replace(step, **changes)


def _to_go(episode: Episode, gamma: float) -> Iterator[float]:
    """G of each call, as its definition has it."""
    earned = [t.reward for t in episode.transitions]
    earned[-1] += episode.terminal or 0.0
    for t in range(len(earned)):
        yield sum(gamma**k * reward for k, reward in enumerate(earned[t:]))
