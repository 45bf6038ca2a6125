"""The documentation is true: generated pages, how-to pages, names in texts, and the site."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import CHROMIUM, MISSING, opened
from testing_aids import run_command

from agl_core import kinds
from agl_core.capture import StatusRule, message_status
from agl_core.capture import status as capture_status
from agl_core.capture.status import REPORTED, WORDS
from agl_core.config.load import load
from agl_core.kinds import Component
from agl_core.learning.transitions import build_episode
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_verl.options import VerlOptions

from ..settings.settings_found import every_setting, settings_of
from .conftest import DISTRIBUTIONS, ROOT


def test_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setattr(sys, "argv", ["make_reference.py", "--check"])
    importlib.import_module("make_reference").main()


def _rules_of_adapters(monkeypatch: pytest.MonkeyPatch) -> list[StatusRule]:
    """Those of all adapters of this repository, installed or not, as `status_rules` orders them."""
    brought: dict[str, Component] = {}
    packages = (ROOT / "adapters").glob("*/agl_*/")
    for file in (max(package.glob("plugin.py"), default=package / "__init__.py") for package in packages):
        plugins, module = Plugins(), types.ModuleType(f"{file.parent.name}_alone")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # Dataclasses look for it.
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        plugins.register(module, str(file))
        brought |= plugins.components(kinds.ADAPTER)
    return [rule for _, component in sorted(brought.items()) for rule in component.status_rules]


@pytest.mark.parametrize(
    ("text", "status", "rule"),
    [
        ("Error executing task with agent 'geographer'. Error: no city", "error", "crewai"),
        ("Error executing task with agent 'geographer'. Error: the request timed out", "timeout", "crewai"),
        ("Error executing tool: no answer in 5 seconds, timed out", "timeout", "crewai"),
        ("\nError executing tool. coworker mentioned not found, it must be one of …", "error", "crewai"),
        ("I encountered an error while trying to use the tool. This was the error: no city.", "error", "crewai"),
        ("Tool not found", "error", "crewai"),
        ("I encountered an error in the map", "ok", "ok"),
        ("Tool not found in the shed", "ok", "ok"),
        ("Failed to invoke Tool `look` with parameters {'timeout': 5}. Error: no city", "error", "haystack"),
        ("Failed to invoke Tool `look` with parameters {}. Error: the request timed out", "timeout", "haystack"),
        ("Failed to invoke Tool `look` with parameters {'city'", "error", "haystack"),
        ("Tool 'look' not found. Available tools: weather, status", "error", "haystack"),
        ("Tool shops open at 9", "ok", "ok"),
        ("Error executing tool 'look' with kwargs {} with error:\n no city\n", "error", "langgraph"),
        ("Error invoking tool 'look' with kwargs {'timeout': 5} with error:\n no city\n", "error", "langgraph"),
        ("Error invoking tool 'look' with kwargs {} with error:\n ReadTimeout()\n", "timeout", "langgraph"),
        ("Error executing is hard", "ok", "ok"),
        ("Tool look not found. Please select a tool that is available.", "error", "llama-index"),
        ("Tool look not found in the shed", "ok", "ok"),
        ("An error occurred while running the tool. Please try again.", "error", "openai-agents"),
        ("Tool 'look' timed out after 0.5 seconds.", "timeout", "openai-agents-timeout"),
        ("An error occurred in 1990", "ok", "ok"),
    ],
)
def test_a_frameworks_words_for_a_failure_are_known_where_only_the_conversation_tells(
    text: str, status: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = _rules_of_adapters(monkeypatch)  # Also those of frameworks that are not installed here.
    monkeypatch.setattr(capture_status, "status_rules", lambda: (*REPORTED, *rules, *WORDS))
    assert message_status(text) == (status, rule)


def test_the_page_of_statuses_has_every_rule_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| .* \| (\w+) \| [^|]*\|$", (ROOT / "docs" / "health.md").read_text())
    rules = (*REPORTED, *_rules_of_adapters(monkeypatch), *WORDS)
    assert rows == [(rule.name, str(rule.status)) for rule in rules]


def test_the_readmes_run_is_the_one_that_was_measured() -> None:
    example = ROOT / "examples" / "calc"
    measured = json.loads((example / "results.json").read_text())["calc/seed 0"]["train_rewards"]
    printed = re.findall(r"(?m)^step .*  reward ([\d.]+)", (example / "output.txt").read_text())
    assert printed == [f"{reward:.3f}" for reward in measured]


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", page)) | set(re.findall(r"`([\w./-]+\.md)`", page))
    bases = (ROOT, ROOT / "core" / "agl_core", ROOT / "server" / "agl_server")
    missing = [name for name in named if not any((base / name).exists() for base in bases)]

    assert len(named) > 50
    assert sorted(missing) == []


def test_messages_name_settings_that_exist() -> None:
    """Every dotted key in a text of the product, and every key that a text tells the reader to set, raise or lower."""
    keys = {
        *every_setting(Plugins.load()),
        *settings_of(VerlOptions, "engine.verl"),
    }
    endings = {key.split(".", dots)[-1] for key in keys for dots in range(key.count(".") + 1)}
    known = [re.compile(re.escape(key).replace("NAME", r"[^.]+")) for key in _with_tables(keys)]
    sections = "|".join({key.split(".")[0] for key in keys})
    dotted = re.compile(rf"(?<![\w./@{{}}-])(?:{sections})(?:\.\w+)+")
    to_set = re.compile(r"\b(?:[Ss]et|[Rr]aise|[Ll]ower) (?:its )?([a-z]+(?:[._][a-z]+)+)\b(?!')")

    named = {
        (str(file.relative_to(ROOT)), key)
        for distribution in DISTRIBUTIONS.values()
        for file in distribution.sources
        for text in _texts(ast.parse(file.read_text()))
        if " " in text
        for key in (*dotted.findall(text), *to_set.findall(text))
        if not key.endswith((".py", ".log", ".toml")) and key not in VERLS_OWN
    }

    assert len(named) > 50
    assert {
        (file, key) for file, key in named if key not in endings and not any(k.fullmatch(key) for k in known)
    } == set()


VERLS_OWN = {"algorithm.adv_estimator", "actor.loss_agg_mode"}


def _with_tables(keys: Iterable[str]) -> set[str]:
    """Keys, and the tables that they are in."""
    return {".".join(key.split(".")[:end]) for key in keys for end in range(1, key.count(".") + 2)}


def _texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module but for its docstrings; `{}` stands for what is filled in."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Expr):
            parts.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
FILES = {
    (page.stem, name): text
    for page in PAGES
    for name, text in re.findall(r'^```(?:python|toml) title="(.+?)"\n(.*?)^```$', page.read_text(), re.M | re.S)
}
CONFIGURATIONS = [key for key in FILES if key[1].endswith(".toml")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The files that the pages take for granted: an agent, tasks and a model."""
    (tmp_path / "my_agent.py").write_text("def solve(task_input):\n    return task_input\n")
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "input": "Oslo?", "answer": "4"}\n')
    (tmp_path / "tiny-model").symlink_to(ROOT / "examples" / "calc" / "policy")
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in {"my_agent", "my_rewards"} - modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("page", "name"), CONFIGURATIONS, ids=lambda text: text)
def test_a_run_with_the_pages_files_is_accepted(page: str, name: str, folder: Path) -> None:
    for (of, file), text in FILES.items():
        if of == page:
            (folder / file).write_text(text)

    # Where no policy of the run answers, there is no engine and no algorithm.
    kinds_needed = (
        kinds.KINDS if "[policies" in FILES[page, name] else (kinds.TASK_SOURCE, kinds.REWARD, kinds.CONFIG_TABLE)
    )
    load(folder / name, needs=kinds_needed)


def test_the_rewards_of_the_page_give_what_they_say(folder: Path) -> None:
    file = folder / "my_rewards.py"
    file.write_text(FILES["own-reward", "my_rewards.py"])
    plugins = Plugins.load([file])
    calls = [make.call(0), make.call(1)]
    sorry = replace(calls[0].choices[0], message={"role": "assistant", "content": "Sorry, I cannot."})
    calls[0] = replace(calls[0], choices=(sorry,))
    task = replace(make.rollout().task, metadata={"answer": "4"})
    episode = build_episode(make.rollout(task=task), make.attempt(result="It is 4."), calls, [])

    def score(name: str, **settings: int) -> object:
        component = plugins.component(kinds.REWARD, name, "the page")
        return component.build(component.options(**settings), None)(episode)

    assert score("right") == 1.0
    assert score("few_calls") == 1.0
    assert score("few_calls", most=1) == 0.0
    assert score("no_apology") == {episode.transitions[0].key: -0.1}


SITE = ROOT / "docs" / "site" / "mkdocs.yml"
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?! rel="(?:canonical|prev|next)"))\b[^>]*?\b(?:src|href)="?([^" >]+)"""
)
"""The addresses that a browser loads with a page: scripts, styles, fonts, pictures."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = (sys.executable, "-m", "mkdocs", "build", "--strict")
    run_command(*build, "--config-file", SITE, "--site-dir", folder, NO_MKDOCS_2_WARNING="1")
    return folder


def test_every_page_of_the_navigation_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        addresses = LOADED.findall(page.read_text())
        assert addresses
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], page
    assert '"location":"health.html' in (site / "search" / "search_index.js").read_text(), "for pages from the disk"
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//", style.read_text()) == [], style


@pytest.mark.storm
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_search_works_where_the_site_is_read_from_the_disk(site: Path, tmp_path: Path) -> None:
    with opened(tmp_path) as page:
        page.look()
        page.open((site / "health.html").as_uri())
        page.run("document.querySelector('input[name=query]').focus()")
        page.send("Input.insertText", text="rollout")
        page.until("document.querySelector('.md-search-result__link')")


def test_links_lead_from_the_site_to_readmes_and_their_files(site: Path) -> None:
    core = (site / "repository" / "core" / "index.html").read_text()

    assert 'href="../../view.html"' in core
    assert (site / "repository" / "examples" / "calc" / "train.toml").is_file()
    assert (site / "repository" / "examples" / "calc" / "curves.svg").is_file()
    linked = re.findall(r"\]\((.+?)\)", (site / "llms.txt").read_text())
    sources = re.findall(r"^ +- (\S+\.md)$", SITE.read_text(), re.MULTILINE)
    assert linked == [source.replace("README.md", "index.html").replace(".md", ".html") for source in sources]
    assert [link for link in linked if not (site / link).is_file()] == []
    assert not list(site.rglob("make_*.py"))
    assert not list(site.rglob("mkdocs.yml"))
