"""Loading: what is accepted, what is resolved and stored, and what a user is told about mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.config.load import CONFIG_FILE, LoadedConfig, apply_overrides, load, store_config
from agl_core.config.models import UntrainedConfig
from agl_core.config.sections import LARGEST, SMALLEST, usual_learning_rate
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

Load = Callable[..., LoadedConfig]
PLUGIN_FILE = Path(__file__).with_name("fakes.py")


def test_a_table_that_stands_alone_is_the_choice(loaded: Load) -> None:
    """A setting of a plugin can be set alone from the command line."""
    changes = {"algorithm": {"comparing": {"beta": 0.5}}, "engine": None, "policies.default.credit": {"whole": {}}}

    run = loaded(changes, "engine.pretending.threads=2")

    plan = run.policies["default"]
    assert (plan.algorithm.component.name, plan.credit.component.name) == ("comparing", "whole")
    assert plan.algorithm.options.model_dump()["beta"] == 0.5
    assert run.engine.component.name == "pretending"


def test_paths_are_resolved_against_the_file_and_so_are_those_among_settings_of_plugins(
    folder: Path, loaded: Load, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("HOME", "/home/somebody")
    (folder / "mine.py").write_text("")
    settings = {"maybe": "~/two.bin", "many": ["a", "/b", "../c"], "named": {"d": "e/f"}}
    settings["models"] = ["weights", "some/model", "http://localhost:8000/v1"]

    run = loaded({"plugins": [str(PLUGIN_FILE), "mine.py"], "rewards.filing": settings})

    assert run.config.folder == folder.resolve()
    assert run.weights("default") == str(folder / "weights")
    assert run.config.plugin_files[1] == folder / "mine.py"
    assert run.rewards["filing"].options.model_dump() == {
        "one": folder / "one.bin",
        "maybe": Path("/home/somebody/two.bin"),
        "many": (folder / "a", Path("/b"), folder.parent / "c"),
        "named": {"d": folder / "e" / "f"},
        "models": (str(folder / "weights"), "some/model", "http://localhost:8000/v1"),
        "inside": {"file": folder / "nested.bin"},
        "text": "one.bin",
    }
    assert run.tasks["train"].options.model_dump()["file"] == folder / "numbers.txt"
    assert run.config.rewards["filing"].settings["many"] == settings["many"], "the file's own words are stored"


def test_a_policy_may_have_its_own_algorithm_and_credit(loaded: Load) -> None:
    algorithm = {"name": "comparing", "comparing": {"beta": 0.5}}
    critic = {"model": {"path": "weights"}, "algorithm": algorithm, "credit": {"name": "mixing"}}

    run = loaded(
        {"policies.critic": critic},
        "policies.critic.algorithm.comparing.epsilon=0.1",
        'policies.critic.agents=["crit*"]',
    )

    plan, default = run.policies["critic"], run.policies["default"]
    assert plan.algorithm.options.model_dump() == {"beta": 0.5, "epsilon": 0.1}
    assert default.algorithm.options.model_dump() == {"beta": 0.04, "epsilon": 0.2}
    assert (plan.credit.component.name, default.credit.component.name) == ("mixing", "whole")
    assert run.config.policies["critic"].agents == ("crit*",)
    assert run.config.policies["default"].algorithm is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=5", ("train", "steps", 5)),
        ("train.steps = 5", ("train", "steps", 5)),
        ("sampling.temperature=0.5", ("sampling", "temperature", 0.5)),
        ("name=first-try", ("name", None, "first-try")),
        ('name="quoted"', ("name", None, "quoted")),
        ("agent.entry=other:run", ("agent", "entry", "other:run")),
        ("train.deterministic=true", ("train", "deterministic", True)),
        ('train.agents=["a", "b*"]', ("train", "agents", ("a", "b*"))),
    ],
)
def test_set_overrides_one_key_the_last_one_wins_and_seed_beats_the_file(
    loaded: Load, override: str, expected: tuple[str, str | None, Any]
) -> None:
    section, key, value = expected
    config = loaded({"seed": 1}, "train.steps=4", override, seed=7).config

    setting = getattr(config, section)
    assert ((setting if key is None else getattr(setting, key)), config.seed) == (value, 7)


def test_a_plugin_is_chosen_by_its_name_alone_and_tables_stay(loaded: Load) -> None:
    names = ("algorithm=dpo", "policies.default.credit=air")
    assert apply_overrides(data := {"algorithm": {"name": "grpo", "grpo": {"epochs": 2}}}, names) == {
        ("algorithm", "name"),
        ("policies", "default", "credit", "name"),
    }
    assert data["algorithm"] == {"name": "dpo", "grpo": {"epochs": 2}}
    apply_overrides(data := {"algorithm": "grpo", "policies": {"a": {"credit": "air"}}}, [
        "algorithm.dpo.beta=0.5", "algorithm=dpo", "policies.a.credit=whole",
    ])  # fmt: skip
    chosen = {"name": "dpo", "dpo": {"beta": 0.5}}
    assert data == {"algorithm": chosen, "policies": {"a": {"credit": {"name": "whole"}}}}
    credit = loaded({}).config.credit.name
    assert loaded({"credit": credit}).config.credit.name == credit
    with pytest.raises(ConfigError, match=r"no credit 'idetical'.*It comes from --set"):
        loaded({}, "credit=idetical")


def test_names_in_a_key_need_no_quotes() -> None:
    data: dict[str, Any] = {}
    assert apply_overrides(data, ["algorithm.reinforce++.gamma=0.9", 'rewards."v1.2".weight=2']) == {
        ("algorithm", "reinforce++", "gamma"),
        ("rewards", "v1.2", "weight"),
    }
    assert data == {"algorithm": {"reinforce++": {"gamma": 0.9}}, "rewards": {"v1.2": {"weight": 2}}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "must be KEY=VALUE"),
        ("'a=5", "not a dotted key"),
        ("name.x.y=5", "'name' is a value, not a table"),
        ("train.agents=[1,", "not valid TOML"),
        ("train.stepz=5", "there is no such key. Did you mean 'steps'?"),
        ("train.steps=0", "[train] steps: must be greater than or equal to 1, not 0. (It comes from --set.)"),
    ],
)
def test_a_bad_override_says_so(loaded: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded({"name": "run"}, override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("config_version", 2, "config_version: must be 1, not 2."),
        ("tarin", {"steps": 1}, "tarin: there is no such key. Did you mean 'train'?"),
        ("train.steps", "5", '[train] steps: must be a valid integer, not "5".'),
        ("train", 5, "train: must be an object, not 5."),
        ("train.agents", "a", '[train] agents: must be a valid array, not "a".'),
        ("agent", {}, "agent: needs one of entry = 'module:function', command = 'a program' and harness = 'its name'."),
        ("policies.default.model.dtype", "flaot32", ".model] dtype: must be 'auto', 'float32' or 'bfloat16', not"),
        ("policies.default.model.lora", {"rnk": 4}, ".lora] rnk: there is no such key. Did you mean 'rank'?"),
        ("policies.default.algorithm", {"name": "comparing", "comparing": {"beta": -1}},
         "[policies.default.algorithm.comparing] beta: must be greater than or equal to 0"),
        ("policies.default.algorithm", {"name": "comparing", "beta": 1},
         "[policies.default.algorithm] beta: there is no such key here; settings stand in "
         "[policies.default.algorithm.comparing]."),
        ("policies.default.algorithm", {"comparing": {}, "judging": {}},
         "[policies.default.algorithm] name: is missing"),
        ("policies.default.credit", {"name": "whol"}, "[policies.default.credit] name: there is no credit 'whol'."),
        ("policies.second", {"agents": ["wr*"], "model": {"path": "weights"}},
         "policies: 'wr*' in the agents of 'second' has no effect: the agents of 'default', which comes first"),
        ("policies.second", {"agents": ["writer"], "model": {"path": "weights"}},
         "policies: 'writer' in the agents of 'second' has no effect"),
        *(
            ("policies", {name: {"model": {"path": "weights"}}}, f"'{name}' has no `agents`, and is almost 'default'")
            for name in ("defualt", "Default", "defaults")
        ),
        ("policies", {}, "policies: needs a policy, for instance [policies.default]."),
        ("policies", {"../writer": {"model": {"path": "weights"}}}, "cannot be a policy's name"),
        ("policies.default.model.path", "./nowhere", "[policies.default.model] path: there is no folder"),
        ("tasks", {"eval": {"source": "counting"}}, "tasks: needs the table [tasks.train]."),
        ("tasks.train.limt", 3, "[tasks.train] limt: task source 'counting' ("),
        ("train.endings", {"crashed": "scor"}, "[train.endings] crashed: must be a valid number or be 'drop' or"),
        ("eval.modes", ["train"], "[eval] modes: must name 'eval-greedy', 'eval-sampled' or both."),
        ("algorithm.comparin", {}, "[algorithm] comparin: there is no algorithm 'comparin'. Did you mean 'comparing'?"),
        ("engine.pretending", {"cache": {"slts": 1}}, "Did you mean 'slots'? Known: key, slots."),
        ("rewards.short", {"rule": "brevty"}, "[rewards.short] rule: there is no reward 'brevty'."),
        ("rewards.clashing", {}, "[rewards] clashing: reward 'clashing' ("),
        ("rewards.agent", {"rule": "filing"}, "a table cannot be called 'agent'"),
        ("trackers.tensorbored", {}, "[trackers] tensorbored: there is no tracker 'tensorbored'."),
        ("trackers.shouting", {"lowd": True}, "does not honour it. Did you mean 'loud'?"),
        ("trackers.posting", {}, "[trackers.posting] url: is missing."),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place_and_remedy(
    loaded: Load, folder: Path, key: str, value: Any, message: str
) -> None:
    agents = {"policies.default.agents": ["wr*"]} if key == "policies.second" else {}

    with pytest.raises(ConfigError) as error:
        loaded({**agents, key: value})

    assert message in str(error.value)
    assert str(error.value).startswith(f"{folder / 'train.toml'}: ")
    assert "\n" not in str(error.value)


def test_all_problems_are_told_together(loaded: Load) -> None:
    with pytest.raises(ConfigError) as error:
        loaded({"algorithm.name": "x", "engine.pretending": {"y": 1}, "rewards.z": {}})

    message = str(error.value)
    assert message.splitlines()[0].endswith("has 3 problems:")
    for key in ("[algorithm] name", "[engine.pretending] y", "[rewards] z"):
        assert f"\n  {key}: " in message


def test_tables_of_plugins_that_are_not_chosen_may_stay(loaded: Load) -> None:
    run = loaded({"algorithm": {"name": "easy", "comparing": {"beta": 0.5}}})
    assert run.policies["default"].algorithm.component.name == "easy"
    assert run.config.algorithm.settings["comparing"]["beta"] == 0.5


def test_a_missing_file_and_bad_toml(loaded: Load, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(folder / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"train\.toml is not valid TOML: .*line 2"):
        loaded("config_version = 1\n[agent\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)


def test_tensorboard_stays_beside_a_tracker_that_is_named(loaded: Load) -> None:
    shouting = {"trackers.shouting": {"loud": True}}
    assert loaded(shouting).trackers.keys() == {"tensorboard", "shouting"}
    without = loaded({**shouting, "trackers.tensorboard": False})
    assert without.trackers.keys() == {"shouting"}
    assert without.config.trackers["tensorboard"] is False, "it is stored, so that a resumed run has none either"


def test_the_default_tracker_may_be_missing_but_not_a_named_one(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    installed = importlib.metadata.entry_points(group="agl")
    ours = [entry for entry in installed if entry.name in ("core", "server")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ours)

    assert loaded().trackers == {}
    assert loaded().config.trackers == {}
    with pytest.raises(ConfigError, match=r"\[trackers\] tensorboard: there is no tracker 'tensorboard'"):
        loaded({"trackers.tensorboard": {}})


def test_secrets_reach_the_plugin_but_not_the_resolved_configuration(
    loaded: Load, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = loaded({}, "engine.pretending.token=hunter2", "engine.pretending.cache.key=hunter3")

    assert run.engine.options.token.get_secret_value() == "hunter2"  # type: ignore[attr-defined]
    run_dir = tmp_path_factory.mktemp("run")
    store_config(run.config, run_dir)
    stored = (run_dir / CONFIG_FILE).read_text()
    assert "hunter2" not in stored
    assert "hunter2" not in repr(run.config)
    assert "token =" not in stored
    assert "***" not in stored


def test_the_variables_that_no_agent_may_have_are_those_that_the_run_reads() -> None:
    config = UntrainedConfig.model_validate(
        {
            "config_version": 1,
            "rewards": {"judge": {"api_key_env": "JUDGE_KEY"}, "other": {"api_key_env": None}},
            "policies": {"a": {"model": {"path": "m"}, "algorithm": {"name": "d", "teacher_key_env": "TEACHER_KEY"}}},
            "tasks": {"train": {"source": "mix", "parts": [{"token_env": "PART_KEY"}]}},
            "optimize": {"proposer": {"api_key_env": "PROPOSER_KEY"}},
            "gateway": {"passthrough": {"api_key_env": "PASSTHROUGH_KEY"}},
            "trackers": {"wandb": {}, "mlflow": False},
        }
    )
    keys = {f"{name}_KEY" for name in ("JUDGE", "TEACHER", "PART", "PROPOSER", "PASSTHROUGH")}
    assert config.secret_variables(["WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "PATH"]) == {*keys, "WANDB_API_KEY"}


def test_tables_of_plugins_are_checked(loaded: Load, folder: Path) -> None:
    assert loaded({"garden": {}}).sections["garden"].options.rows == 3
    for garden, says in (
        ({"row": 3}, "[garden] row: table 'garden'"),
        ({"rows": 0}, "[garden] rows: must"),
        (3, "garden: must be a table"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            loaded({"garden": garden})
    loaded({"garden": {"rows": 4}})
    policies = load(folder / "train.toml", needs=(), plugins=Plugins.load())
    assert policies.config.model_extra == {}, "that plugin file is not imported, and its settings may be secrets"
    alone = {"config_version": 1, "plugins": [str(PLUGIN_FILE)], "garden": {}}
    (folder / "train.toml").write_text(tomli_w.dumps(alone))
    assert load(folder / "train.toml", needs=(kinds.CONFIG_TABLE,)).sections["garden"].options.rows == 3


CHANGED = {
    "seed=3", "folder=inside", 'agent.command=["python", "agent.py"]', "agent.attach=false",
    "tasks.held-out.source=counting", "tasks.train.limit=77", "async.max_staleness=3", "async.in_flight=40",
    "policies.second.model.path=Qwen/Qwen2.5-0.5B", 'policies.default.agents=["writer", "edit*"]',
    "policies.default.algorithm.comparing.beta=0.0", "policies.default.credit.name=either",
    "policies.default.model.lora.alpha=8.5", 'policies.default.model.lora.targets=["q_proj"]',
    "policies.default.optimizer.learning_rate=5e-4", "sampling.temperature=0.7", "train.endings.crashed=-0.5",
    'eval.modes=["eval-sampled"]', "gateway.passthrough.url=https://embeddings.example/v1",
    "workers.memory_mib=512", "rewards.short.rule=brevity", "rewards.short.limit=5", "rewards.brevity.weight=0.5",
    "credit.name=per_step", "algorithm.name=easy", "engine.pretending.cache.slots=2",
    "trackers.shouting.loud=true", "trackers.tensorboard=false", "alarms.no_contrast=false", "alarms.stall=9.5",
}  # fmt: skip
"""One of every type of value, and of every way in which a table names its plugin."""


def test_what_is_stored_is_what_was_loaded(
    loaded: Load, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "inside" / "weights").mkdir(parents=True)

    first = loaded({"agent": None}, *CHANGED)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store_config(first.config, elsewhere)
    second = load(elsewhere / CONFIG_FILE)

    assert second.config == first.config
    written = (elsewhere / CONFIG_FILE).read_text().splitlines()
    assert {"epsilon = 0.2", "group_size = 8", 'finished = "score"'} <= set(written), "defaults too"
    assert second.config.folder == first.config.folder == folder / "inside"
    plain = first.config.model_dump(mode="json")
    assert (plain["async"]["in_flight"], plain["alarms"]["stall"]) == (40, 9.5)
    assert (plain["rewards"]["short"]["limit"], plain["tasks"]["train"]["limit"]) == (5, 77)
    assert plain["policies"]["default"]["algorithm"]["comparing"] == {"beta": 0.0, "epsilon": 0.2}


sizes = st.integers(1, 10**12)


@given(sizes, sizes)
def test_larger_models_take_no_larger_steps_and_adapters_ten_times_the_step(one: int, other: int) -> None:
    weights = (*sorted((one, other)), None)
    rates = [usual_learning_rate(count, adapter=False) for count in weights]
    assert LARGEST >= rates[0] >= rates[1] >= rates[2] == SMALLEST == 1e-6
    for count, rate in zip(weights, rates, strict=True):
        assert 8 * rate < usual_learning_rate(count, adapter=True) < 12 * rate
