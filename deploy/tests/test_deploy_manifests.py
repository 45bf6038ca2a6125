"""The manifests are what Kubernetes and KubeRay take, and agree with each other, the configuration and the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deployed import CONFIGS, DEPLOY, ROOT, container, kustomization, manifests, named, pod_templates

from agl_core.config.load import LoadedConfig, load
from agl_core.wire import OPERATOR_KEY, WORKER_KEY
from agl_verl.versions import KNOWN

KUBERNETES = "1.34"
SCHEMA = yaml.safe_load((Path(__file__).parent / "rayjob.schema.yaml").read_text())
TEMPLATES = pod_templates()


@pytest.fixture
def chosen() -> LoadedConfig:
    """The configuration that the ConfigMap holds."""
    [generated] = kustomization()["configMapGenerator"]
    [file] = generated["files"]
    name, _, path = file.partition("=")
    assert name == "train.toml"
    return load(DEPLOY / path)


@pytest.mark.parametrize(("file", "document"), manifests(), ids=lambda each: getattr(each, "name", ""))
def test_objects_are_valid(file: Path, document: dict[str, Any]) -> None:
    if document["kind"] == "RayJob":
        jsonschema.validate(document, SCHEMA)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_pod_templates_are_valid(template: dict[str, Any]) -> None:
    """Those of the RayJob too, which no schema of Kubernetes reaches."""
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(entryPoint="typo"),
        lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(replicas="8"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
    ],
)
def test_the_schema_of_a_rayjob_refuses_what_kuberay_would(spoil: Any) -> None:
    job = named("RayJob", "agl-train")
    spoil(job["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def test_the_kustomization_names_every_file_but_the_job() -> None:
    listed = {DEPLOY / each for each in kustomization()["resources"]}
    assert listed == {file for file, _ in manifests()} - {DEPLOY / "kubernetes" / "rayjob.yaml"}
    assert named("RayJob", "agl-train")["metadata"]["namespace"] == kustomization()["namespace"]


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_selectors_select_their_own_pods(kind: str) -> None:
    [each] = [document for _, document in manifests() if document["kind"] == kind]
    assert each["spec"]["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_the_service_leads_to_the_port_that_the_server_listens_on() -> None:
    service = named("Service", "agl-server")["spec"]
    server = named("StatefulSet", "agl-server")
    assert service["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    worker_labels = TEMPLATES["worker"]["metadata"]["labels"].items()
    assert not service["selector"].items() <= worker_labels, "workers are no servers"
    [outside], [inside] = service["ports"], container(server["spec"]["template"])["ports"]
    assert outside["targetPort"] == inside["name"]
    assert f"--port={inside['containerPort']}" in container(TEMPLATES["server"])["args"]
    assert server["spec"]["serviceName"] == "agl-server"
    address = f"http://agl-server:{outside['port']}"
    assert f"--server={address}" in container(TEMPLATES["worker"])["args"]
    assert f"--server {address} " in named("RayJob", "agl-train")["spec"]["entrypoint"]


def test_everybody_gets_the_keys_they_need_and_no_other() -> None:
    def keys(name: str) -> dict[str, str]:
        env = container(TEMPLATES[name]).get("env", [])
        secret = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in env if "valueFrom" in e}
        assert all(each["name"] == "agl-keys" for each in secret.values())
        return {variable: each["key"] for variable, each in secret.items()}

    assert keys("server") == {WORKER_KEY: "worker", OPERATOR_KEY: "operator"}
    assert keys("worker") == {WORKER_KEY: "worker"}
    assert keys("ray-head") == {OPERATOR_KEY: "operator"}
    assert keys("ray-worker") == {}
    made = re.search(
        r"create secret generic (\S+) .*?--from-literal=(\w+)=.*?--from-literal=(\w+)=", _readme(), re.DOTALL
    )
    assert made is not None
    assert made.groups() == ("agl-keys", "worker", "operator")


def test_only_one_process_writes_the_store() -> None:
    server = named("StatefulSet", "agl-server")["spec"]
    assert server["replicas"] == 1
    [claim] = server["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    mounted = {each["name"]: each["mountPath"] for each in container(server["template"])["volumeMounts"]}
    assert f"--set=runs={mounted[claim['metadata']['name']]}/runs" in container(server["template"])["args"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_run_without_rights_and_mount_what_there_is(name: str) -> None:
    pod, only = TEMPLATES[name]["spec"], container(TEMPLATES[name])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert only["securityContext"].get("readOnlyRootFilesystem", False) == (name in ("server", "worker"))
    there = {each["name"] for each in pod["volumes"]}
    if name == "server":
        there |= {
            each["metadata"]["name"] for each in named("StatefulSet", "agl-server")["spec"]["volumeClaimTemplates"]
        }
    assert {each["name"] for each in only["volumeMounts"]} == there
    shared = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert all(named("PersistentVolumeClaim", each)["spec"]["accessModes"] == ["ReadWriteMany"] for each in shared)
    assert len(shared) == (name in ("ray-head", "ray-worker")), "every Ray node sees the checkpoints"
    assert "memory" in only["resources"]["limits"]


def test_images_are_built_by_the_dockerfile() -> None:
    built = dict(re.findall(r"--target (\w+)\s+-t (\S+)", (DEPLOY / "Dockerfile").read_text()))
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert set(built) == set(stages)
    kinds = {"server": "server", "worker": "worker", "ray-head": "trainer", "ray-worker": "trainer"}
    assert {name: container(each)["image"] for name, each in TEMPLATES.items()} == {
        name: built[target] for name, target in kinds.items()
    }


def test_a_worker_that_is_told_to_end_has_the_time_that_an_attempt_may_take(chosen: LoadedConfig) -> None:
    [drain] = [float(each.partition("=")[2]) for each in container(TEMPLATES["worker"])["args"] if "--drain" in each]
    assert chosen.config.workers.timeout < drain < TEMPLATES["worker"]["spec"]["terminationGracePeriodSeconds"]


def test_there_are_as_many_workers_as_rollouts_under_way_want(chosen: LoadedConfig) -> None:
    config = chosen.config
    rollouts = config.train.groups_per_step * (config.asynchronous.max_staleness + 1) * config.train.group_size
    assert named("Deployment", "agl-worker")["spec"]["replicas"] * config.workers.concurrency == rollouts
    assert not config.workers.embedded


def test_the_job_has_the_gpus_that_its_configuration_asks_for(chosen: LoadedConfig) -> None:
    options = chosen.config.engine.settings
    spec = named("RayJob", "agl-train")["spec"]
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpus = container(group["template"])["resources"]["limits"]["nvidia.com/gpu"]
    assert (group["replicas"], gpus) == (options["nodes"], options["gpus_per_node"])
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    assert options["gpus_per_node"] % options["tensor_parallel"] == 0, "a replica stays within a node"
    words = spec["entrypoint"].split()
    assert words[3] == chosen.config.name, "trainer and server name the same run"
    assert f"COPY --chmod=755 deploy/{words[0]} /usr/local/bin/" in (DEPLOY / "Dockerfile").read_text()
    assert "engine.verl.address=auto" in words


def test_the_trainers_image_has_the_versions_that_are_known_to_work() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    pinned = dict(re.findall(r"([\w-]+)(?:\[\w+\])?\"?==([\w.]+)", text.replace('"ray[default]', "ray")))
    assert {name: (pinned[name],) for name in KNOWN} == dict(KNOWN)
    assert named("RayJob", "agl-train")["spec"]["rayClusterSpec"]["rayVersion"] in KNOWN["ray"]


def test_images_copy_what_the_build_context_has() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    sources = re.findall(r"^COPY (?:--\S+ )?(\S+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for source in {each.replace("${AGENT}", "examples/calc") for each in sources}:
        assert (ROOT / source).exists()
        assert any(f"!{part}" in ignored for part in (source, Path(source).parts[0]))


def _readme() -> str:
    return (DEPLOY / "README.md").read_text()


def test_every_configuration_is_in_the_page() -> None:
    assert len(CONFIGS) == 3
    for file in [*CONFIGS, DEPLOY / "Dockerfile", *(file for file, _ in manifests()), DEPLOY / "slurm/train.sbatch"]:
        assert str(file.relative_to(DEPLOY)) in _readme()
