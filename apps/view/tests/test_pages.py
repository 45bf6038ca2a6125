"""Every page over HTTP: what it says about runs, whatever agents wrote into them, and whatever their files are like."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agl_core.testing import episodes as make
from agl_core.types import Attempt, Call, Ending, Mode, Reward, Rollout, Task, TrainingRecord
from agl_view.serving import make_app

from .conftest import HERE, HOSTILE, Folder, Parsed, rollout, text_of

STEP = "/runs/calc/rollouts?step=1&mode=train"


def test_runs_have_state_progress_and_evaluations(runs: Folder) -> None:
    assert "There are no runs here yet" in runs.page("/")
    runs.trained()

    page = text_of(runs.page("/"))

    assert "calc stopped not yet 1 / 4" in page
    assert "0.250 0.750" in text_of(runs.page("/?text=CAL&sort=after"))
    assert "No run has this in its name." in text_of(runs.page("/?text=another"))


def test_a_run_has_curves_with_links_to_the_rollouts_of_each_step(calc: Folder) -> None:
    page = Parsed(calc.page("/runs/calc"))

    charts = {attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"}
    assert "Reward. training from 1.5 to 1.5; eval, greedy from 0.25 to 0.75" in charts
    assert "Proof. different from 1 to 1; exact from 3 to 3" in charts
    assert {"Dropped. no_advantage from 4 to 4", "Groups without contrast. from 0.5 to 0.5"} <= charts
    assert STEP in page.links
    assert next(attributes for tag, attributes in page.tags if tag == "details") == {}, "one step is no curve: folded"


def test_endings_stand_beside_the_reward_and_shares_on_an_axis_of_all_of_them(runs: Folder) -> None:
    line = {"kind": "train", "restart": 0, "reward/mean": 0.5, "groups/no_contrast": 0.25, "ending/finished": 20}
    runs.make(metrics=[{**line, "step": step, "ending/crashed": 2} for step in (1, 2)])

    page = runs.page("/runs/calc")

    assert "crashed, of 44 rollouts 4" in text_of(page)
    assert "/runs/calc/rollouts?mode=train&ending=crashed" in Parsed(page).links
    assert page.count(">1</text>") == 4, "the top of both axes, and the first step"
    assert next(attributes for tag, attributes in Parsed(page).tags if tag == "details") == {"open": None}


def test_a_run_that_imitates_has_the_curve_of_its_loss(runs: Folder) -> None:
    lines = [{"step": step, "kind": "eval", "restart": 0, "demos/loss": loss} for step, loss in enumerate((2.0, 0.5))]
    step = {"step": 1, "kind": "train", "restart": 0, "update/loss": 1.5, "seconds/rollouts": 3, "seconds/update": 1}
    runs.make(metrics=[*lines, step])

    page = runs.page("/runs/calc")

    charts = {attributes["aria-label"] for tag, attributes in Parsed(page).tags if tag == "svg"}
    assert "Loss. training, loss from 1.5 to 1.5; demos, loss from 2 to 0.5" in charts
    assert "demos, loss 2.000 → 0.500" in text_of(page)


def test_from_the_reward_curve_to_the_reason_for_one_advantage_in_four_clicks(calc: Folder) -> None:
    run = next(link for link in Parsed(calc.page("/")).links if link == "/runs/calc")
    rollouts = next(link for link in Parsed(calc.page(run)).links if link == STEP)
    group = next(link for link in Parsed(calc.page(rollouts)).links if "/groups/" in link)
    one = next(link for link in Parsed(calc.page(group)).links if link.endswith("rollouts/s1-g0-m1"))
    page = text_of(calc.page(one))

    assert "Terminal reward 0" in page
    assert "right rule right 0 2" in page
    assert "mean 1, deviation 1.414 over 2 rollouts" in page
    assert "credit 0 advantage -0.7 weight in the loss 0.125" in page


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("", 4),
        ("agent=critic", 1),
        ("ending=finished", 4),
        ("ending=crashed", 0),
        ("min_reward=0&max_reward=0", 1),
        ("min_reward=1", 3),
        ("text=it+is+41", 1),
        ("text=TABLE", 4),
        ("mode=eval-greedy", 0),
        ("step=2", 0),
        ("policy=other", 0),
        ("tool=look&tool_status=error", 1),
        ("tool_status=timeout", 0),
        ("dropped=no_advantage", 2),
    ],
)
def test_filters_are_in_the_address(calc: Folder, query: str, number: int) -> None:
    page = calc.page(f"/runs/calc/rollouts?{query}")

    assert f"{number} of {0 if query in ('mode=eval-greedy', 'step=2') else 4} rollouts" in page


def test_rollouts_come_in_pages_of_whole_groups_training_first(runs: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_view.pages.PAGE_SIZE", 3)
    runs.trained()
    evaluated = [
        replace(r, mode=Mode.EVAL_GREEDY) for r in rollout("s9-g9-m0", answer="Bern") if isinstance(r, Rollout)
    ]
    runs.make("calc", *evaluated)

    def page(address: str) -> tuple[str, list[str]]:
        html = runs.page(f"/runs/calc/rollouts{address}")
        return text_of(html), [link for link in Parsed(html).links if link.startswith("?")]

    newest, [older] = page("?")
    assert "6 * 7 s1-g1 mean 2 deviation 0 no contrast m0 1 2 – m1 1 2 –" in newest
    assert ("s1-g0 " in newest, "s9-g9" in newest) == (False, False)
    oldest, [newer] = page(older)
    assert ("s1-g0 " in oldest, "s1-g1 " in oldest) == (True, False)
    assert page(newer)[0] == newest
    assert "s9-g9" in page("?mode=")[0]


@pytest.mark.parametrize("query", ["step=x", "step=inf", "step=1e40", "mode=other", "min_reward=much"])
def test_a_filter_that_cannot_be_read_is_named(calc: Folder, query: str) -> None:
    assert query in calc.page(f"/runs/calc/rollouts?{query}", 400)


@pytest.mark.parametrize(
    ("address", "markup"),
    [
        ("/runs/calc", ["model <b>weights</b>, algorithm <b>grpo</b>", "entry = &#34;my_agent:solve&#34;"]),
        ("/runs/calc/rollouts?step=1", ["no contrast</span>"]),
        (
            "/runs/calc/groups/s1-g0-m1",
            [
                "rollouts/s1-g0-m0",  # The better one first.
                "rollouts/s1-g0-m1",
                '<span class="same">look({&#34;at&#34;: &#34;table&#34;})</span></pre>',
                "they part</span>",
                '<span class="same">It is </span><mark>42</mark>',
            ],
        ),
        ("/runs/calc/rollouts/s1-g0-m0", 2 * ["2 tokens trained on: 1 exact (50%), 1 different"]),
        ("/runs/calc/rollouts/s1-g1-m0", ["2 earlier messages", "no_advantage</span>"]),
        (
            "/runs/calc/call?rollout=s1-g0-m0&attempt=0&call=s1-g0-m0-c1",
            [
                '<span class="lp0" title="token 7, log-probability -0.01">7</span>',
                '<span class="lp5" title="token 8, log-probability -4.5">8</span>',
                "It is 42",
                "tool_call_id",
            ],
        ),
    ],
)
def test_each_page_has_what_was_recorded(calc: Folder, address: str, markup: list[str]) -> None:
    page = calc.page(address)

    at = 0
    for part in markup:
        at = page.find(part, at)
        assert at >= 0, part


def test_text_of_agents_is_text_on_every_page(runs: Folder) -> None:
    records = [
        *rollout("s1-g0-m0", answer=HOSTILE, reward=1.0, advantage=0.7, agent=HOSTILE, question=HOSTILE),
        *rollout("s1-g0-m1", answer="41", reward=0.0, advantage=-0.7, ending=Ending.CRASHED, question=HOSTILE),
    ]
    runs.make("calc", *records)

    for address in (
        "/runs/calc",
        "/runs/calc/rollouts",
        "/runs/calc/rollouts?text=%3Cscript%3E%22%27&step=1",
        "/runs/calc/groups/s1-g0-m0",
        "/runs/calc/rollouts/s1-g0-m0",
        "/runs/calc/call?rollout=s1-g0-m0&attempt=0&call=s1-g0-m0-c0",
    ):
        page = runs.page(address)
        parsed = Parsed(page)
        assert [attributes["src"] for tag, attributes in parsed.tags if tag == "script"] == ["/static/view.js"], address
        assert not [name for _, names in parsed.tags for name in names if name.startswith("on") or name == "style"]
        assert not set("\x1b\u202e\ud800") & set(page), address
    assert "<script>alert(1)</script>" in text_of(runs.page("/runs/calc/rollouts/s1-g0-m0"))
    assert "{{ 7 * 7 }}" in text_of(runs.page("/runs/calc/rollouts/s1-g0-m0"))


def test_names_of_runs_may_have_every_kind_of_character(runs: Folder) -> None:
    name = "a b?#'\"<i>é"
    runs.trained(name)

    link = next(link for link in Parsed(runs.page("/")).links if link.startswith("/runs/"))

    assert text_of(runs.page(link)).startswith(f" {name} – agl")
    assert runs.page(next(link_ for link_ in Parsed(runs.page(link)).links if link_.endswith("step=1&mode=train")))


def test_two_folders_of_one_name_are_two_runs(tmp_path: Path, runs: Folder) -> None:
    one = runs.trained()
    (tmp_path / "other").mkdir()
    browser = TestClient(make_app([one, tmp_path / "other"], "t"), "http://localhost", client=HERE)
    other = Folder(tmp_path / "other", browser)
    other.make()
    other.browser.get("/?token=t")

    assert {"/runs/calc", "/runs/calc~2"} <= set(Parsed(other.page("/")).links)
    assert "4 of 4 rollouts" in other.page("/runs/calc~2/rollouts") + other.page("/runs/calc/rollouts")


def test_a_run_without_steps(runs: Folder) -> None:
    runs.make("calc", *rollout("s1-g0-m0", answer="42"))

    assert "No step has ended yet" in runs.page("/runs/calc")
    assert "1 of 1 rollouts" in runs.page("/runs/calc/rollouts")
    assert "not part of an update" in runs.page("/runs/calc/rollouts/s1-g0-m0").lower()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(b"This is no database." * 1000), "is not an SQLite database"),
        (lambda file: _set_version(file, 9999), "schema version 9999"),
    ],
)
def test_a_store_that_cannot_be_read_leaves_the_curves(
    runs: Folder, damage: Callable[[Path], object], reason: str
) -> None:
    damage(runs.trained() / "store.sqlite")

    page = runs.page("/runs/calc")

    assert reason in page
    assert 'aria-label="Reward.' in page
    assert reason in runs.page("/runs/calc/rollouts", 503)


def _set_version(file: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(file)) as store:
        store.execute(f"PRAGMA user_version = {version}")


def test_a_folder_that_is_no_run_of_agl(runs: Folder) -> None:
    (runs.path / "foreign").mkdir()
    (runs.path / "foreign" / "config.toml").write_text("train = 3")
    runs.trained()

    assert "its folder cannot be read" in text_of(runs.page("/"))
    assert "1 / 4" in text_of(runs.page("/"))
    assert "is not what a run of agl writes" in runs.page("/runs/foreign", 404)


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("/runs/nope", "There is no run &#39;nope&#39; here."),
        ("/runs/calc/rollouts/s9", "No rollout in"),
        ("/runs/calc/groups/s9", "No rollout in"),
        ("/runs/calc/call?rollout=s1-g0-m0&attempt=0&call=x", "has no call &#39;x&#39;"),
        ("/nothing", "There is no such page."),
        ("/runs/..%2F..%2Fetc", ""),
    ],
)
def test_what_is_not_there(calc: Folder, address: str, what: str) -> None:
    assert what in calc.page(address, 404)


def test_what_the_agent_reported_of_a_call_stands_beside_it(runs: Folder) -> None:
    records = rollout("s1-g0-m0", answer="42", reward=1.0)
    first, _ = (record.id for record in records if isinstance(record, Call))
    told = [Reward("s1-g0-m0", 0, "step", 0.5, "agent", call) for call in (first, "nobody's")]
    runs.make("calc", *records, *told)

    page = text_of(runs.page("/runs/calc/rollouts/s1-g0-m0"))

    assert page.count("The agent reported step 0.5.") == 1
    assert page.index("turn 0,") < page.index("The agent reported step") < page.index("turn 1,")
    assert "Reward step 0.5 (by agent, for call nobody's) does not count." in page


def test_calls_past_agl_and_undelivered_replies_stand_before_the_turn_that_counts(runs: Folder) -> None:
    bypassed = {"https://api.openai.com/v1/responses": 2}
    records = [
        replace(record, undelivered=record.sequence == 0)
        if isinstance(record, Call)
        else replace(record, bypassed=bypassed, error="Traceback:\n  line 1")
        if isinstance(record, Attempt)
        else record
        for record in rollout("s1-g0-m0", answer="42", reward=1.0)
    ]
    runs.make("calc", *records)

    page = text_of(runs.page("/runs/calc/rollouts/s1-g0-m0"))

    assert page.count("A reply that solver did not get, and that does not count: look(") == 1
    assert page.index("did not get") < page.index("turn 0,")
    assert "Past agl, and not recorded: 2 calls to https://api.openai.com/v1/responses" in page
    assert '<pre class="notice bad">Traceback:\n  line 1</pre>' in runs.page("/runs/calc/rollouts/s1-g0-m0")
    records = [
        replace(record, undelivered=True) if isinstance(record, Call) else record
        for record in rollout("s1-g0-m0", answer="42")
    ]
    runs.make("other", *records)
    page = text_of(runs.page("/runs/other/rollouts/s1-g0-m0"))
    assert page.count("did not get") == 2
    assert "It is 42" in page
    assert "It made no call" not in page


def test_a_sub_agents_turn_is_indented_and_the_evidence_of_a_reward_stands_below_it(runs: Folder) -> None:
    asks = {"id": "t", "type": "function", "function": {"name": "ask", "arguments": '{"prompt": "What is 6?"}'}}
    asked = make.choice(message={"role": "assistant", "content": None, "tool_calls": [asks]})
    _, _, first, second, _, reward, *_ = records = rollout("s1-g0-m0", answer="6", reward=1.0)
    assert isinstance(first, Call)
    offered = {**first.request, "tools": [{"type": "function", "function": {"name": "ask"}}]}
    told = {"messages": [{"role": "user", "content": "What is 6?"}]}
    records[2:4] = (
        replace(first, agent=None, choices=(asked,), request=offered),
        replace(second, agent=None, request=told),
    )
    records[5] = replace(reward, evidence="<b>2</b> of 3\ntests passed.")
    runs.make("calc", *records)

    page = runs.page("/runs/calc/rollouts/s1-g0-m0")

    assert "Conversations: 1 main, 1 sub-agent" in page
    turns = [tag["class"] for name, tag in Parsed(page).tags if name == "li" and "data-item" in tag]
    assert [str(turn).split()[-1] for turn in turns] == ["depth0", "depth1"]
    assert "sub-agent of turn 0, its turn 0" in page
    assert "<pre>&lt;b&gt;2&lt;/b&gt; of 3\ntests passed.</pre>" in page


NUMBERS = {"kind": "train", "restart": 0, "reward/mean": 0.5, "health/healthy": 6.0, "health/unhealthy": 2.0}
ALARM = {"name": "truncated", "remedy": "Raise the limit.", "details": ""}


def test_alarms_verdicts_and_reasons(runs: Folder) -> None:
    runs.trained()
    runs.make(
        "calc",
        metrics=[
            {
                **NUMBERS,
                "step": 1,
                "unhealthy/truncated": 2.0,
                "alarms": [{**ALARM, "seen": f"0.4: {HOSTILE[:-1]}"}],
            },
            {**NUMBERS, "step": 2, "alarm/truncated": 1.0},
        ],
    )
    page = runs.page("/runs/calc/health")
    text = text_of(page)
    assert "truncated since step 1 0.4: <script>" in text
    assert "What to do Raise the limit." in text
    assert "<script>alert" not in page
    assert "2 6 2 0" in text
    assert "unhealthy: truncated 2" in text
    assert "/runs/calc/health" in runs.page("/runs/calc")


def test_a_run_without_steps_and_one_with_damaged_metrics(runs: Folder) -> None:
    folder = runs.make("calc")
    assert "No step has ended yet." in text_of(runs.page("/runs/calc/health"))
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 1, "kind": "train"}\n\xff{nonsense\n[1]\n{"step": 2, "kind": "train", "alarms": 7}\n{"step"'
    )
    text = text_of(runs.page("/runs/calc/health"))
    for line in (2, 3, 4):
        assert f"Line {line} of metrics.jsonl is no line of metrics" in text
    assert "Line 5" not in text, "it may be half written"
    assert "None was raised." in text


def test_two_runs_are_compared_by_their_rewards_and_settings(runs: Folder) -> None:
    runs.trained()
    config = runs.trained("other") / "config.toml"
    config.write_text(config.read_text().replace('name = "grpo"', 'name = "ppo"'))
    chosen = {names.get("value") for tag, names in Parsed(runs.page("/")).tags if names.get("name") == "run"}
    assert chosen == {"calc", "other"}

    page = runs.page("/compare?run=calc&run=other")

    charts = [attributes["aria-label"] for tag, attributes in Parsed(page).tags if tag == "svg"]
    assert charts == [
        "Reward. calc, training from 1.5 to 1.5; calc, eval, greedy from 0.25 to 0.75; "
        "other, training from 1.5 to 1.5; other, eval, greedy from 0.25 to 0.75"
    ]
    assert "Settings that differ 1 setting calc other algorithm.name grpo ppo" in text_of(page)
    assert "Choose one or two runs" in runs.page("/compare", 400)
    assert "There is no run" in runs.page("/compare?run=nope", 404)


def test_two_evaluations_are_compared_task_by_task(runs: Folder) -> None:
    rewards = {0: (0.0, 1.0, 1.0), 2: (1.0, 0.0, 1.0)}
    records = [
        replace(record, mode=Mode.EVAL_GREEDY, step=step, task=Task(f"t{at}", {"question": f"number {at}"}))
        if isinstance(record, Rollout)
        else record
        for step, given in rewards.items()
        for at, reward in enumerate(given)
        for record in rollout(f"s{step}-g{at}-m0", answer="1", reward=reward)
        if not isinstance(record, TrainingRecord)
    ]
    metrics = [{"step": at, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": 0.5} for at in rewards]
    runs.make("calc", *records, metrics=metrics)

    page = text_of(runs.page("/compare?run=calc"))

    assert "Solved now, or better 1 a higher reward than before task before after number 0 0 2 side by side" in page
    assert "Lost, or worse 1 a lower reward than before task before after number 1 2 0 side by side" in page
    assert "The same 1" in page
    assert "mean over the 3 tasks of both1.333 → 1.333" in page
    assert page == text_of(runs.page("/compare?a=calc@0&b=calc@2&mode=eval-greedy"))
    assert "no task in common" in runs.page("/compare?a=calc@0&b=calc@1")
    assert "a=x" in runs.page("/compare?a=calc@x&b=calc@1", 400)


def test_no_code_of_a_run_runs_and_nothing_in_its_folder_changes(runs: Folder) -> None:
    folder = runs.trained()
    (folder / "plugin.py").write_text("from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n")
    config = folder / "config.toml"
    config.write_text(f'plugins = ["{folder}/plugin.py"]\n{config.read_text()}')
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}

    for page in ("", "/rollouts", "/rollouts/s1-g0-m0", "/groups/s1-g0-m0", "/health", "/changed"):
        runs.page(f"/runs/calc{page}")

    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()} == before


def test_one_task_of_two_runs_is_side_by_side(runs: Folder) -> None:
    runs.trained("calc@home")
    runs.trained()
    address = "/compare/task?a=calc%40home%40s1-g0-m1&b=calc%40s1-g0-m0"

    page = text_of(runs.page(address))

    assert "One task, before and after" in page
    assert "calc@home, step 1 0 calc, step 1 2 turn 0" in page
    assert "It is 41" in page
    assert "It is 42" in page
    assert "different tasks" not in page
    runs.make("sum", *rollout("s1-g0-m0", answer="2", question="1 + 1"))
    assert "different tasks" in runs.page("/compare/task?a=calc@s1-g0-m1&b=sum@s1-g0-m0")
    assert "b in the address must be RUN@ROLLOUT" in runs.page("/compare/task?a=calc@s1-g0-m1", 400)
    assert "nope" in runs.page("/compare/task?a=calc@s1-g0-m1&b=calc@nope", 404)
    assert "There is no run" in runs.page("/compare/task?a=nope@s1-g0-m1&b=calc@x", 404)
