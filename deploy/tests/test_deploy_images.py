"""Images, scripts and command lines of deploy/: what they have, and a job among stand-ins for Slurm and Ray."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from pathspec import PathSpec
from testing_aids import run_command

from agl_core.cli import app
from agl_core.config.check import cautions
from agl_core.config.load import load

from .deployed import CONFIGS, DEPLOY, ROOT, CommandLine, command_lines, container, named, pod_templates
from .slurm_stand_ins import BESIDE_PYTHON, NODES, Cluster

pytestmark = pytest.mark.usefixtures("agl_verl_is_installed")

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IGNORED = PathSpec.from_lines("gitignore", (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines())
"""Docker reads these patterns as Git does: each begins with `**/` or has a slash inside."""
COPIED = re.findall(r"^COPY (?:--\S+ )?(\S+) \S+$", DOCKERFILE, re.MULTILINE)
AGENTS = ["my_agent", "team/agents/my_agent", "tests/my_agent", "examples/calc", "deploy/agents/mine", "core/agents"]


def test_images_are_built_by_the_dockerfile() -> None:
    built = dict(re.findall(r"--target (\w+)\s+-t (\S+)", DOCKERFILE))
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert set(built) == set(stages)
    trainers = ("ray-head", "ray-worker", "ray-job-submitter")
    kinds = {"worker": "worker", **dict.fromkeys(trainers, "trainer")}
    assert {name: container(template)["image"] for name, template in pod_templates().items()} == {
        name: built[target] for name, target in kinds.items()
    }


def test_the_trainers_image_has_the_versions_that_are_known_to_work() -> None:
    pinned = dict(re.findall(r"([\w-]+)(?:\[\w+\])?\"?==([\w.]+)", DOCKERFILE.replace('"ray[default]', "ray")))
    project = tomllib.loads((ROOT / "algorithms" / "verl" / "pyproject.toml").read_text())["project"]
    required = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    others = [one for one in required if not one.name.startswith("agl-")]
    exact = [one for one in others if str(one.specifier).startswith(("~=", "=="))]
    assert len(exact) == 7
    assert all(one.specifier.contains(pinned[one.name]) for one in exact)
    assert named("RayJob", "agl-train")["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]


def test_the_trainers_image_pins_what_these_stand_on() -> None:
    trainer = DOCKERFILE.partition("AS trainer")[2].replace("\\\n", " ")
    installs = [line for line in trainer.splitlines() if re.search(r"vllm==|\./core", line)]
    assert len(installs) == 2
    assert all("pip install -c constraints.txt " in line for line in installs)


NOT_COPIED = re.compile(
    r"(^|/)(__pycache__|\.\w+_cache|[^/]+\.egg-info)/|^(core|server|rewards|(adapters|algorithms|apps)/[^/]+)/tests/"
)


def files(source: str) -> list[str]:
    """The files that are there, but for what a machine makes and the packages' tests."""
    there = [ROOT / source, *(ROOT / source).rglob("*")]
    names = [path.relative_to(ROOT).as_posix() for path in there if path.is_file()]
    return [name for name in names if not NOT_COPIED.search(name)]


@pytest.mark.parametrize("source", sorted({path.replace("${AGENT}", "examples/calc") for path in COPIED}))
def test_images_copy_what_the_build_context_has(source: str) -> None:
    assert files(source)
    assert [path for path in files(source) if IGNORED.match_file(path)] == []


@pytest.mark.parametrize("folder", AGENTS)
def test_the_agent_may_be_any_folder_below_the_repository(folder: str) -> None:
    """`--build-arg AGENT=…`"""
    assert COPIED.count("${AGENT}") == len(re.findall("^ARG AGENT=", DOCKERFILE, re.MULTILINE)) == 2
    for file in (
        "agent.py",
        "train.toml",
        "policy/model.safetensors",
        "tools/keys.py",
        "tests/data.jsonl",
        "tokens.json",
    ):
        assert not IGNORED.match_file(f"{folder}/{file}")


@pytest.mark.parametrize("folder", ["", *(f"{agent}/" for agent in AGENTS)])
def test_no_keys_and_nothing_of_this_machine_is_copied(folder: str) -> None:
    for file in (
        ".git/config", ".venv/bin/python", ".venv-verl/pyvenv.cfg", "runs/calc/store.sqlite", "runs/calc/server.json",
        "server.json", ".env", ".env.local", "prod.env", ".envrc", "tls.key", "ca.pem", "id_rsa", "id_ed25519.pub",
        ".ssh/config", ".aws/credentials", ".kube/config", "kubeconfig.yaml", ".netrc", ".docker/config.json",
        ".pypirc", "client_secret_1.json", "secrets.yaml", "secrets.toml", "credentials.json",
        "__pycache__/agent.pyc", ".pytest_cache/README.md", "agent.egg-info/PKG-INFO", "agl-7.log", ".git-credentials",
    ):  # fmt: skip
        assert IGNORED.match_file(folder + file), folder + file


COMMANDS = list(command_lines())
CALC = ROOT / "examples" / "calc"
OTHERS = {
    "HOME": "whoever keeps files there",
    "HF_HOME": "huggingface_hub's folder of downloaded models",
    "RAY_JOB_STOP_WAIT_TIME_S": "ray/dashboard/modules/job/job_supervisor.py",
}
"""Environment variables in pods that are not agl's, and who reads them."""


def parse(words: tuple[str, ...]) -> None:
    """As typed, without running it; a usage error says what is wrong."""
    whole = typer.main.get_command(app)
    with whole.make_context("agl", list(words)) as context:
        name, command, rest = whole.resolve_command(context, [*context._protected_args, *context.args])
        with command.make_context(name, rest, parent=context):
            pass


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: f"{line.source}:{line.words[0]}")
def test_command_lines_are_parsed_and_their_settings_are_those_of_a_configuration(line: CommandLine) -> None:
    parse(line.words)
    load(
        DEPLOY / "configs" / "64-gpus.toml", [f"folder={CALC}" if s.startswith("folder=") else s for s in line.settings]
    )


def test_every_place_is_looked_at() -> None:
    tested = {(line.source, line.words[0]) for line in COMMANDS}
    assert {
        ("worker", "worker"), ("rayjob.yaml", "train"), ("train.sbatch", "worker"), ("train.sbatch", "train"),
        ("train-or-resume", "train"), ("README.md", "train"), ("1-gpu.toml", "train"), ("8-gpus.toml", "train"),
    } <= tested  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_configurations_go_together(config: Path) -> None:
    loaded = load(config)
    assert list(cautions(loaded)) == []
    options = loaded.config.engine.settings["verl"]
    assert options["nodes"] * options["gpus_per_node"] == int(config.stem.partition("-")[0])


def test_environment_variables_are_read_by_somebody() -> None:
    code = "\n".join(
        file.read_text() for top in ("core", "algorithms") for file in (ROOT / top).glob("**/agl_*/**/*.py")
    )
    files = [file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix in ("", ".md", ".sbatch", ".yaml")]
    texts = [file.read_text() for file in files]
    named = {name for text in texts for name in re.findall(r"\bAGL_[A-Z_]+\b", text)}
    assert "AGL_WORKER_KEY" in named
    for name in named:
        assert f'"{name}"' in code, name
    in_pods = {e["name"] for template in pod_templates().values() for e in container(template).get("env", [])}
    assert in_pods - named == OTHERS.keys()


SBATCH = DEPLOY / "slurm" / "train.sbatch"
SCRIPTS = [DEPLOY / "train-or-resume", DEPLOY / "containers" / "kubernetes-job", SBATCH]
ENDED_BY_SLURM = (0, -signal.SIGTERM, -signal.SIGKILL)
"""A job that was queued again: Slurm ends it, unless it comes to its own end before."""
RAY_KEYS = ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_good_bash(script: Path) -> None:
    run_command("bash", "-n", script)
    run_command("shellcheck", script, PATH=BESIDE_PYTHON)
    assert os.access(script, os.X_OK)


def test_the_dockerfile_is_well_formed() -> None:
    run_command("hadolint", "--failure-threshold=style", DEPLOY / "Dockerfile", PATH=BESIDE_PYTHON)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path)
    yield cluster
    for process in cluster.running():
        process.kill()


def test_a_job_starts_everything_trains_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(), 0)
    starts = [call[0] for call in cluster.calls("ray", "start")]
    assert sorted("--head" in words for words in starts) == [*[False] * (NODES - 1), True]
    assert {words[1] for words in starts if "--head" not in words} == {"--address=127.0.0.1:6379"}
    [(train, keys, _)] = cluster.calls("agl", "train")
    assert keys == ["AGL_WORKER_KEY", *RAY_KEYS]
    assert [keys for _, keys, _ in cluster.calls("ray", "start")] == [RAY_KEYS] * NODES
    assert {f"engine.verl.nodes={NODES}", "engine.verl.gpus_per_node=8", "engine.verl.address=127.0.0.1:6379"} < set(
        CommandLine("", tuple(train)).settings
    )
    assert {"server.host=127.0.0.1", "server.port=8123"} < set(CommandLine("", tuple(train)).settings)
    workers = cluster.calls("agl", "worker")
    assert [keys for _, keys, _ in workers] == [["AGL_WORKER_KEY"]] * NODES, "agents see their worker's environment"
    assert {call[0][-1] for call in workers} == {"http://127.0.0.1:8123"}
    assert not cluster.calls("scontrol")
    # Each step has one task on each of its nodes, and shares them with the others: srun takes its defaults from what
    # sbatch set, which are the job's three tasks, also on one node.
    steps = [call[0] for call in cluster.calls("srun")]
    options = [[word for word in step if word.startswith("--") and step.index(word) < 7] for step in steps]
    [head] = [step for step in options if "--nodelist=node-1" in step]
    [others] = [step for step in options if "--exclude=node-1" in step]
    [everywhere] = [step for step in options if step not in (head, others)]
    for step, nodes in ((head, 1), (others, NODES - 1), (everywhere, NODES)):
        assert {f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"} < set(step)
        assert "--overlap" in step, "it would wait for what the steps before it have: CPUs, memory, GPUs"
        assert "--exact" not in step, "Ray would find one CPU of each node"
        assert not any(word.startswith(("--cpus-per-task", "--mem")) for word in step), "all that the job has"
    assert "#SBATCH --mem=0\n" in SBATCH.read_text(), "--exclusive alone does not give a node's memory"


def test_the_same_line_goes_on_where_the_last_job_ended(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(TRAINS="3"), 3)
    cluster.ended(cluster.submit(SLURM_JOB_ID="8"), 0)
    first, second = (call[0] for call in cluster.calls("agl", "train"))
    assert "--resume" not in first
    assert second[:3] == ["train", "--resume", str(cluster.folder / "runs" / "calc-64")]
    assert second[3:] == first[6:], "the cluster is that of the new job"


def test_sigterm_has_the_trainer_stop(cluster: Cluster) -> None:
    job = cluster.trains()
    job.send_signal(signal.SIGTERM)
    cluster.ended(job, 0)
    assert cluster.calls("scontrol") == []


@pytest.mark.parametrize(("trains", "says"), [("on", ""), ("stuck", "did not end within 1 s")])
def test_a_job_whose_time_is_up_queues_itself_again(cluster: Cluster, trains: str, says: str) -> None:
    """Its trainer is killed if it does not end in time, which costs its checkpoint."""
    job = cluster.trains(TRAINS=trains, GRACE="1")
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, *ENDED_BY_SLURM)
    assert says in cluster.log()
    assert [call[0] for call in cluster.calls("scontrol")] == [["requeue", "7"]]


def test_there_is_time_for_the_steps_after_the_trainer() -> None:
    script = SBATCH.read_text()
    [notice] = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    [grace] = re.findall(r"\$\{GRACE:-(\d+)\}", script)
    # Slurm may send it a minute early or late, and the steps get a minute.
    assert int(notice) - int(grace) - 2 * 60 >= 60
    assert re.search(rf"^# GRACE .* {grace}$", script, re.MULTILINE)


def test_a_job_without_what_it_needs_says_what_is_missing(cluster: Cluster) -> None:
    del cluster.environment["RUNS"]
    assert cluster.submit().wait(30) == 1
    assert re.search("RUNS: a folder that every node sees", cluster.log())
