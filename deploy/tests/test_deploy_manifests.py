"""The manifests are what Kubernetes and KubeRay take, and agree with each other, the configuration and the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from agl_core.config.load import LoadedConfig, load
from agl_core.wire import WORKER_KEY

from .deployed import DEPLOY, container, kustomization, manifests, named, pod_templates

pytestmark = pytest.mark.usefixtures("agl_verl_is_installed")

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


@pytest.mark.parametrize(("file", "document"), manifests(), ids=lambda part: getattr(part, "name", ""))
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


def test_the_kustomization_names_every_file_but_the_job() -> None:
    listed = {DEPLOY / name for name in kustomization()["resources"]}
    assert listed == {file for file, _ in manifests()} - {DEPLOY / "kubernetes" / "rayjob.yaml"}
    assert named("RayJob", "agl-train")["metadata"]["namespace"] == kustomization()["namespace"]


def test_workers_are_selected_by_their_own_labels() -> None:
    workers = named("Deployment", "agl-worker")["spec"]
    assert workers["selector"]["matchLabels"].items() <= workers["template"]["metadata"]["labels"].items()


def test_the_service_leads_to_the_port_that_the_trainer_listens_on() -> None:
    service = named("Service", "agl-trainer")["spec"]
    labels = TEMPLATES["ray-head"]["metadata"]["labels"] | {"ray.io/node-type": "head"}  # KubeRay's own
    assert service["selector"].items() <= labels.items()
    for other in ("worker", "ray-worker"):
        assert not service["selector"].items() <= TEMPLATES[other]["metadata"]["labels"].items(), other
    [outside] = service["ports"]
    inside = {port["name"]: port["containerPort"] for port in container(TEMPLATES["ray-head"])["ports"]}
    entrypoint = named("RayJob", "agl-train")["spec"]["entrypoint"]
    assert f"--set server.host=0.0.0.0 --set server.port={inside[outside['targetPort']]} " in entrypoint
    assert f"--server=http://agl-trainer:{outside['port']}" in container(TEMPLATES["worker"])["args"]


def test_everybody_gets_the_keys_they_need_and_no_other() -> None:
    def keys(name: str) -> dict[str, str]:
        env = container(TEMPLATES[name]).get("env", [])
        secret = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in env if "valueFrom" in e}
        assert all(reference["name"] == "agl-keys" for reference in secret.values())
        return {variable: reference["key"] for variable, reference in secret.items()}

    assert keys("worker") == keys("ray-head") == {WORKER_KEY: "worker"}
    assert keys("ray-worker") == keys("ray-job-submitter") == {}
    command = re.search(
        r"create secret generic (\S+) .*?--from-literal=(\w+)=", (DEPLOY / "README.md").read_text(), re.DOTALL
    )
    assert command is not None
    assert command.groups() == ("agl-keys", "worker")


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_run_without_rights_and_mount_what_there_is(name: str) -> None:
    pod, only = TEMPLATES[name]["spec"], container(TEMPLATES[name])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert only["securityContext"].get("readOnlyRootFilesystem", False) == (name == "worker")
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    there = {volume["name"] for volume in pod.get("volumes", [])}
    assert {mount["name"] for mount in only.get("volumeMounts", [])} == there
    claims = [volume["persistentVolumeClaim"] for volume in pod.get("volumes", []) if "persistentVolumeClaim" in volume]
    shared = [claim["claimName"] for claim in claims]
    assert all(named("PersistentVolumeClaim", name)["spec"]["accessModes"] == ["ReadWriteMany"] for name in shared)
    assert len(shared) == (name in ("ray-head", "ray-worker")), "every Ray node sees the checkpoints"
    assert "memory" in only["resources"]["limits"]


def reachable(component: str) -> dict[str, set[int] | None]:
    """From which components, and at which ports (None: all), its pods can be called."""
    ports_of: dict[str, set[int] | None] = {}
    for policy in (m["spec"] for _, m in manifests() if m["kind"] == "NetworkPolicy"):
        if policy["podSelector"]["matchLabels"] != {"app.kubernetes.io/component": component}:
            continue
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy.get("ingress", []):
            for source in rule["from"]:
                [(label, value)] = source["podSelector"]["matchLabels"].items()
                elsewhere = "namespaceSelector" in source
                assert label == f"app.kubernetes.io/{'name' if elsewhere else 'component'}"
                ports_of[value] = {port["port"] for port in rule["ports"]} if "ports" in rule else None
    return ports_of


def test_pods_are_reached_by_those_who_need_them_and_by_no_agent() -> None:
    components = {name: t["metadata"]["labels"]["app.kubernetes.io/component"] for name, t in TEMPLATES.items()}
    assert components == {
        "worker": "worker",
        "ray-head": "trainer",
        "ray-worker": "trainer",
        "ray-job-submitter": "submitter",
    }
    ports = {port["name"]: port["containerPort"] for port in container(TEMPLATES["ray-head"])["ports"]}
    dashboard = {ports["dashboard"]}
    assert reachable("trainer") == {
        "trainer": None, "worker": {ports["agl"]}, "submitter": dashboard, "kuberay-operator": dashboard,
    }  # fmt: skip
    assert reachable("worker") == {}
    limited = [m["spec"]["podSelector"] for _, m in manifests() if m["kind"] == "NetworkPolicy"]
    assert {"matchLabels": {"app.kubernetes.io/component": "worker"}} in limited, "without a policy all may call"
    labels = TEMPLATES["ray-head"]["metadata"]["labels"]
    assert "app.kubernetes.io/name" not in labels, "KubeRay's services select by its own"


def test_no_pod_of_the_ray_cluster_is_evicted() -> None:
    budget = named("PodDisruptionBudget", "agl-trainer")["spec"]
    [group] = named("RayJob", "agl-train")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert budget["minAvailable"] == 1 + group["replicas"], "the head too"
    for name in ("ray-head", "ray-worker"):
        assert budget["selector"]["matchLabels"].items() <= TEMPLATES[name]["metadata"]["labels"].items()


def test_nodes_with_gpus_take_the_pods_that_want_them() -> None:
    for name, template in TEMPLATES.items():
        wants = "nvidia.com/gpu" in container(template)["resources"]["limits"]
        tolerated = [toleration["key"] for toleration in template["spec"].get("tolerations", [])]
        assert tolerated == ["nvidia.com/gpu"] * wants, name


def test_a_worker_that_is_told_to_end_has_the_time_that_an_attempt_may_take(chosen: LoadedConfig) -> None:
    [drain] = [float(a.partition("=")[2]) for a in container(TEMPLATES["worker"])["args"] if "--drain" in a]
    assert chosen.config.workers.timeout < drain < TEMPLATES["worker"]["spec"]["terminationGracePeriodSeconds"]


def test_there_are_as_many_workers_as_rollouts_under_way_want(chosen: LoadedConfig) -> None:
    config = chosen.config
    rollouts = config.train.groups_per_step * (config.asynchronous.max_staleness + 1) * config.train.group_size
    assert named("Deployment", "agl-worker")["spec"]["replicas"] * config.workers.concurrency == rollouts
    assert config.workers.processes == 0


def test_the_job_has_the_gpus_that_its_configuration_asks_for(chosen: LoadedConfig) -> None:
    options = chosen.config.engine.settings["verl"]
    spec = named("RayJob", "agl-train")["spec"]
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpus = container(group["template"])["resources"]["limits"]["nvidia.com/gpu"]
    assert (group["replicas"], gpus) == (options["nodes"], options["gpus_per_node"])
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    assert options["gpus_per_node"] % options["tensor_parallel"] == 0, "a replica stays within a node"
    words = spec["entrypoint"].split()
    assert words[3] == chosen.config.name, "the run has the name of its configuration"
    assert f"COPY --chmod=755 deploy/{words[0]} /usr/local/bin/" in (DEPLOY / "Dockerfile").read_text()
    assert "engine.verl.address=auto" in words
