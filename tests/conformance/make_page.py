"""Writes docs/conformance.md from the scenarios and what the drivers declare: python -m tests.conformance.make_page."""

from __future__ import annotations

import inspect
from pathlib import Path

from .apart import APART
from .driver import Driver
from .drivers import DRIVERS
from .scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """# Conformance

This page shows what every adapter has to get right, whatever the framework: **who** made each call, **which** tokens
were sampled, and **what the tools did**. `tests/conformance` plays the same scripts with the real API of each
framework, through the real gateway and the real store. It compares the episode that agl builds with the episode that is
written beside the script: agent names, turns, response token ids and log-probabilities, whose prompt it was, and each
tool result with its status, arguments and tool call id. Nothing may be missing, and nothing may be added.

```
python -m pytest tests/conformance
```

`make docs` generates this page from the scenarios and from what the drivers declare. Every cell is a test. A cell that
is a gap is tested too: the test fails if the gap passes, so a gap cannot outlive its reason.

## The scenarios

| scenario | what happens | calls |
|---|---|---|
"""

_LEGEND = """Each driver plays every scenario with each of its APIs, except for its gaps. In the form `attach` the
agent has no line of agl, and every installed adapter is attached at once, as agl's workers do. A driver's first form is
played with and without streaming. Each further form is played once for each API, alternating between both."""

_APART = """## Frameworks with an environment of their own

The pins of these frameworks do not go together. `make test-frameworks` makes an environment for each, with its newest
release, and plays the same scenarios there. `make newest` also plays the drivers above with the newest releases of its
frameworks, and says what breaks.
"""

_OWN = """## Your own adapter

A driver plays the scenarios with your framework. From a clone of this repository, with your package installed, or with
its folder in `PYTHONPATH`:

```
python -m pytest tests/conformance/test_conformance_cells.py --driver your_module:YourDriver
```

Then your driver alone is played, and no other framework is imported. A driver is one class; this one is
`tests/conformance/example_driver.py`:

```python
{example}```

`build` makes the agents as a user of your framework would, from `scenario.agents`. Each agent has a `prompt` (the
scripted model recognises the agent by it), `tools` (functions in `TOOLS` of `.scenarios`),
`experts` (agents called as tools, by their name, with one argument `task`) and `handoffs` (`transfer_to_NAME`). Some
scenarios ask for more: an answer by a schema (`agent.answers`), a shortened conversation (`agent.keeps`), tools in
plain text (`scenario.react`), the same prompt several times at once (`scenario.samples`), several replies to one call
(`scenario.choices`). Several agents of a scenario run at the same time. The rest is played by the suite.

All agents are answered by a model client for `setting.api` at `setting.base_url`, which streams if `setting.streaming`
is set. What `build` returns is awaited once for each rollout, inside it.

In the form `attach`, all installed adapters are attached, including yours if it is registered as a plugin. To play an
adapter that is not installed, give the driver `forms = ("mine",)` and a method `adapters(self, form)` that returns a
list with it. If your adapter also has a line for the user's code, name that as a form, and use the form that
`setting.form` names. If your framework cannot express a scenario, raise `InexpressibleError`, and put the scenario into
`gaps` with the reason. An adapter that only names agents passes most scenarios; `tool errors` shows whether the
conversation tells what the tools did, or the adapter has to ([adapters](plugins.md#adapter)).
`tests/conformance/drivers` and `tests/conformance/apart` hold the drivers above.
"""


def render() -> str:
    """The whole page."""
    example = Path(__file__).with_name("example_driver.py").read_text()
    lines = [_HEAD.rstrip()]
    for scenario in SCENARIOS:
        calls = len(scenario.turns()) * scenario.rollouts
        lines.append(f"| {scenario.name} | {scenario.about} | {calls} |")
    lines += ["", "## The drivers", "", _LEGEND]
    for driver in DRIVERS:
        lines += ["", *_driver(driver)]
    lines += ["", _APART.rstrip()]
    for driver in APART:
        lines += ["", *_driver(driver)]
    return "\n".join(lines) + "\n\n" + _OWN.format(example=example)


def _driver(driver: Driver) -> list[str]:
    """The lines about what the driver plays, and its gaps."""
    lines = ["### " + driver.name, "", inspect.cleandoc(driver.__doc__ or ""), ""]
    streaming = "" if True in driver.streaming else ", without streaming"
    lines.append(f"- Played: {', '.join(driver.apis)}{streaming}; {', '.join(f'`{form}`' for form in driver.forms)}.")
    lines += [f"- Not played: {api}. {reason}" for api, reason in driver.without.items()]
    for gap in driver.gaps:
        streams = ["streaming" if streams else "not streaming" for streams in gap.streaming]
        where = [*gap.apis, *streams, *(f"`{form}`" for form in gap.forms)]
        shown = f" ({', '.join(where)})" if where else ""
        lines.append(f"- Gap: {gap.scenario}{shown}. {gap.reason}")
    return lines


if __name__ == "__main__":
    PAGE.write_text(render())
