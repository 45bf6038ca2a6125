"""Time goes on in threads: credit of calls that were side by side, against the definition by recursion."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import discounted_returns, episode_return
from agl_core.testing import episodes as make
from agl_core.types import Episode, Lineage, Reward
from agl_core.types.episodes import Moment, Thread, episode_gae, gae


@dataclass(frozen=True, eq=False)
class Node:
    """A call, with the threads that it started."""

    reward: float
    value: float = 0.0
    """The value of its state."""
    is_trained: bool = True
    started: Sequence[Sequence[Node]] = ()


REWARDS = st.floats(-2, 2, width=16)


def threads(depth: int, is_trained: st.SearchStrategy[bool]) -> st.SearchStrategy[list[Node]]:
    """Conversations whose last call starts none, because nothing would come after them."""
    leaves = st.builds(Node, REWARDS, REWARDS, is_trained)
    if depth == 0:
        return st.lists(leaves, min_size=1, max_size=3)
    started = st.lists(threads(depth - 1, is_trained), max_size=2)
    inner = st.lists(st.builds(Node, REWARDS, REWARDS, is_trained, started), max_size=3)
    return st.builds(lambda calls, last: [*calls, last], inner, leaves)


TREES = threads(2, st.just(True))


def played(main: Sequence[Node], shuffle: random.Random) -> tuple[list[Node], Mapping[Node, Thread]]:
    """The calls in an order in which they may start, threads side by side at random, and the thread of each."""
    around: dict[Node, tuple[Sequence[Node], Node] | None] = {}

    def run(calls: Sequence[Node], start: tuple[Sequence[Node], Node] | None) -> Iterator[Node]:
        for call in calls:
            around[call] = start
            yield call
            running = [run(child, (calls, call)) for child in call.started]
            while running:
                chosen = shuffle.choice(running)
                if (following := next(chosen, None)) is None:
                    running.remove(chosen)
                else:
                    yield following

    order = [*run(main, None)]
    turns = {call: turn for turn, call in enumerate(order)}
    places: dict[Node, Thread] = {}
    for call in order:
        if (start := around[call]) is None:
            places[call] = ()
        else:
            mine = next(child for child in start[1].started if call in child)
            places[call] = (*places[start[1]], (turns[start[1]], turns[mine[0]]))
    return order, places


def episode(main: Sequence[Node], terminal: float, shuffle: random.Random) -> tuple[list[Node], Episode]:
    order, places = played(main, shuffle)
    transitions = []
    for turn, call in enumerate(order):
        t = make.transition(turn, lineage=Lineage(thread=places[call]))
        transitions.append(replace(t, rewards=(Reward("r", 0, "step", call.reward, "test", t.key.call, 0),)))
    return order, make.episode(*transitions, terminal=terminal)


@dataclass
class Definition:
    """The advantages of all calls, from the end of each thread to its beginning."""

    gamma: float
    lam: float = 1.0
    of: dict[Node, float] = field(default_factory=dict)

    def alone(self, calls: Sequence[Node]) -> float:
        """The earnings of a thread by itself, seen from the step before it."""
        if not calls:
            return 0.0
        gamma = self.gamma if calls[0].is_trained else 1.0
        return gamma * (calls[0].reward + self.alone(calls[1:]) + sum(map(self.alone, calls[0].started)))

    def fill(self, calls: Sequence[Node], after: Node | None, end: float) -> None:
        for call in reversed(calls):
            advantage = call.reward + sum(map(self.alone, call.started)) - call.value
            if after is None:
                advantage += end
            else:
                gamma = self.gamma if after.is_trained else 1.0
                advantage += gamma * after.value + gamma * self.lam * self.of[after]
            self.of[call] = advantage
            for child in call.started:
                self.fill(child, after, end)
            after = call


@given(TREES, REWARDS, st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_call_leads_to_the_next_of_its_thread_and_to_what_it_started_whatever_ran_beside_it(
    main: list[Node], terminal: float, gamma: float, lam: float, shuffle: random.Random
) -> None:
    expected = Definition(gamma, lam)
    expected.fill(main, None, terminal)
    order, one = episode(main, terminal, shuffle)
    assert episode_gae(one, [call.value for call in order], gamma, lam) == pytest.approx(
        [expected.of[c] for c in order]
    )


@given(TREES, REWARDS, st.randoms(use_true_random=False))
def test_undiscounted_the_first_call_leads_to_the_whole_return(
    main: list[Node], terminal: float, shuffle: random.Random
) -> None:
    one = episode(main, terminal, shuffle)[1]
    assert discounted_returns(one, gamma=1.0)[0] == pytest.approx(episode_return(one))


@given(threads(1, st.just(True)), st.integers(0, 9), TREES, REWARDS, st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_thread_beside_changes_no_other_and_what_led_to_it_only_by_what_it_earns(
    main: list[Node], at: int, beside: list[Node], terminal: float, gamma: float, shuffle: random.Random
) -> None:
    at, main = at % len(main), [*main, Node(0.5)]
    order, one = episode(main, terminal, shuffle)
    before = dict(zip(order, discounted_returns(one, gamma), strict=True))
    parent = replace(main[at], started=[*main[at].started, beside])
    order, one = episode([*main[:at], parent, *main[at + 1 :]], terminal, shuffle)
    after = dict(zip(order, discounted_returns(one, gamma), strict=True))
    later = [*main[at + 1 :], *(call for one in main[at:] for child in one.started for call in child)]
    assert [after[call] for call in later] == [before[call] for call in later]
    earned = Definition(gamma).alone(beside)
    grown = [after[parent] - before[main[at]], *(after[call] - before[call] for call in reversed(main[:at]))]
    assert grown == pytest.approx([gamma**steps * earned for steps in range(at + 1)], abs=1e-9)


@given(threads(2, st.booleans()), st.floats(0, 1), st.randoms(use_true_random=False))
def test_calls_of_the_environment_take_no_time_and_what_they_earn_belongs_to_the_step_that_led_there(
    main: list[Node], gamma: float, shuffle: random.Random
) -> None:
    expected = Definition(gamma)
    expected.fill(main, None, 0.0)
    order, places = played(main, shuffle)
    calls = [Moment(i, places[c], c.reward, 0.0 if c.is_trained else None) for i, c in enumerate(order)]
    returns = {c: expected.of[c] + c.value for c in order}
    got = dict(zip(order, gae(calls, gamma, 1.0), strict=True))
    assert {c: got[c] for c in order if c.is_trained} == pytest.approx({c: returns[c] for c in order if c.is_trained})


@pytest.mark.parametrize(("gamma", "expected"), [(0.5, [6.5, 5.5, 10.0, 9.0]), (1.0, [15.0, 15.0, 10.0, 14.0])])
def test_a_thread_that_nobody_waited_for_goes_on_with_the_end(gamma: float, expected: list[float]) -> None:
    below: Thread = ((0, 1),)
    calls = [Moment(0, (), 0, 0), Moment(1, below, 1, 0), Moment(2, (), 2, 0), Moment(3, below, 4, 0)]
    assert gae(calls, gamma, 1.0, terminal=8.0) == expected
