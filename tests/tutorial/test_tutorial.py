"""A reader's tutorial: the pages' commands from an empty folder, in order, and what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import PAGES, blocks, instance, updated
from .terminal import Terminal, UnexpectedError, lines_of

MOST_COMMANDS = 10
SHOWING = (
    "agl show",
    "agl rollouts",
    "agl view",
    "agl doctor",
    "agl reward",
    "agl eval",
    "agl policy list",
    "cat ",
    "head ",
)
"""Commands that look at something: nothing after them needs them."""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    folder = tmp_path / "tutorial"
    folder.mkdir()
    opened = Terminal(folder)
    yield opened
    opened.close()


def test_few_commands_lead_from_the_agent_to_the_policy_in_use() -> None:
    commands = list(lines_of(PAGES))
    needed = [command for command in commands if not command.startswith((*SHOWING, "agl policy export"))]

    assert [command.split(" --")[0] for command in needed][:2] == [
        "cp -r $AGL/examples/calc/policy tiny-model",
        "agl init my_agent.py",
    ]
    assert needed[-1].endswith('python my_agent.py "What is 36 plus 48?"')
    assert len(needed) <= MOST_COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_commands_has_its_box(page: Path) -> None:
    found = [block for block in blocks(page.read_text()) if block.commands or block.is_box]

    expected = [block.is_box for block in found]
    assert expected[0] is False
    for number, block in enumerate(found[:-1]):
        if any(command.startswith("agl") for command in block.commands):
            assert found[number + 1].is_box, block.text
    assert expected[-1]


@pytest.mark.parametrize(
    ("box", "output", "shown"),
    [
        ("reward 0.1\n", "reward 0.97\n", "reward 0.97\n"),
        ("a\n…\nz\n", "a\nb\nc\nz\n", "a\n…\nz\n"),
        ("…\nm 1\n…\n", "a\nm 2\nz\n", "…\nm 2\n…\n"),
        ("url http://h/?token=…\n", "url http://h/?token=abc\n", "url http://h/?token=…\n"),
        ("reward 0.1\n", "no reward\n", None),
        ("a\n", "a\nb\n", None),
        ("a\n…\nz\n", "a\nz\nmore\n", None),
        ("a\nb\n…\n", "a\nc\nb\n", None),
    ],
)
def test_a_box_fits_what_differs_in_numbers_alone(box: str, output: str, shown: str | None) -> None:
    assert updated(box, output) == shown


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("run 2\na\nz\n", "run 2\na\nz\n"),
        ("run 2\ny\nz\n", None),
        ("no run\na\nb\n", None),
        ("", None),
    ],
)
def test_an_instance_fits_what_is_half_the_same(output: str, shown: str | None) -> None:
    assert instance("run 1\na\nb\nc\n", output) == shown


PAGE = """
```python title="say.py"
print("reward 0.97")
```

```console
$ ls
$ python say.py
```

```text title="Expected"
say.py
reward 0.1
```

```console title="A second terminal"
$ cat say.py -
```

```text title="Expected"
print…
```

```console
$ {last}
```

```text title="Expected"
7
```
"""


def test_a_page_is_played_in_an_empty_folder_and_written_anew(terminal: Terminal) -> None:
    played = terminal.play(PAGE.format(last="expr 2 + 3"))

    assert played == PAGE.format(last="expr 2 + 3").replace("reward 0.1", "reward 0.97").replace("\n7\n", "\n5\n")
    assert (terminal.folder / "say.py").read_text() == 'print("reward 0.97")\n'


@pytest.mark.parametrize("last", ["false", "seq 2"])
def test_a_page_that_does_not_say_what_happens_is_refused(terminal: Terminal, last: str) -> None:
    with pytest.raises(UnexpectedError, match=r"\$ false\nended with status 1|Printed was:\n1\n2\n"):
        terminal.play(PAGE.format(last=last))


@pytest.mark.storm
@pytest.mark.timeout(3000)
def test_the_tutorial_does_what_its_pages_say(terminal: Terminal) -> None:
    for page in PAGES:
        terminal.play(page.read_text())

    run = terminal.folder / "runs" / "my_agent"
    reward = json.loads((run / "summary.json").read_text())["reward"]
    assert reward["before"]["greedy"] < 0.2
    assert reward["after"]["greedy"] > 0.5
    assert reward["after"]["sampled"] > 0.5
    assert (terminal.folder / "my-policy" / "model.safetensors").is_file()
