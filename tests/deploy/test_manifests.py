"""The Kubernetes manifests hold only what Kubernetes knows, and what the tiers need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The job template of the JobSet."""
    import yaml

    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert (jobset["kind"], jobset["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]


def as_known(what: dict[str, Any], model: str) -> dict[str, Any]:
    """The result of Kubernetes' models: unknown fields are dropped, missing ones raise."""
    from kubernetes import client

    api = client.ApiClient()
    read = api.deserialize(json.dumps(what), model, "application/json")
    known: Any = api.sanitize_for_serialization(read)
    return known


def test_every_manifest_field_is_in_the_kubernetes_schema(job: dict[str, Any]) -> None:
    """A misspelled field is dropped by a cluster without a message: a ramdisk on a disk, a grace of 30 s."""
    assert as_known(job["spec"]["template"], "V1PodTemplateSpec") == job["spec"]["template"]
    assert as_known(job["spec"], "V1JobSpec") == job["spec"]


def test_schema_check_detects_a_misspelled_field(job: dict[str, Any]) -> None:
    """A check that passes whatever is written checks nothing."""
    pod = json.loads(json.dumps(job["spec"]["template"]))
    pod["spec"]["volumes"][0]["emptyDir"]["sizeLimits"] = "1Gi"
    assert as_known(pod, "V1PodTemplateSpec") != pod


def test_pod_provides_ramdisk_memory_and_grace_period(job: dict[str, Any]) -> None:
    """A ramdisk on a disk, a pod that forgets it at each restart, or one that is killed in mid-save."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes["ram"]["medium"] == "Memory"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    script = " ".join(container["command"])
    assert f"--ram {mounts['ram']} " in script
    assert f"--ssd {mounts['ssd']} " in script
    assert pod["restartPolicy"] == "OnFailure", "the emptyDir outlives the container"
    spec = job["spec"]
    assert spec["backoffLimit"] >= 100 * spec["parallelism"], "a loss restarts every container, and each one counts"
    of_trainer, of_agent = (float(script.split(flag)[1].split()[0]) for flag in (" --grace-s ", "--preempt-grace "))
    assert of_trainer < of_agent < pod["terminationGracePeriodSeconds"]
    assert f"--nnodes {job['spec']['completions']} " in script


def test_agent_and_trainer_accept_every_flag_in_the_manifests(job: dict[str, Any]) -> None:
    """A flag that was renamed would end every pod with exit code 2."""
    from ckptkit.launch.run_command import run
    from trainer.__main__ import main

    (container,) = job["spec"]["template"]["spec"]["containers"]
    script = (DEPLOY / "slurm.sbatch").read_text().replace("\\\n", " ")
    texts = [" ".join(container["command"]), *(line for line in script.splitlines() if line.startswith("srun "))]
    assert len(texts) == 2
    for text in texts:
        agent, _, trainer = text.partition(" run ")[2].partition(" -- ")
        assert flags(agent) <= {flag for option in run.params for flag in option.opts}
        used = flags(trainer)
        assert {"--cluster", "--grace-s"} <= used <= {flag for option in main.params for flag in option.opts}


def flags(text: str) -> set[str]:
    return {
        word.removeprefix("${EVENTS:+") for word in text.split() if word.removeprefix("${EVENTS:+").startswith("--")
    }
