"""deploy/: the Dockerfile by hadolint, the chart by Helm and by Kubernetes' own schemas, their commands by ours."""

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pipeline.cli import kiln_group

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "kiln"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
KUBERNETES = "1.37"

REGISTRY: dict[str, Any] = {
    "bundles": [
        {"name": "chat", "model": "smollm2", "sku": "cpu-avx512"},
        {"name": "embed", "model": "minilm", "sku": "cpu-avx512", "version": 7},
    ],
    "registry": {"url": "s3://engines/kiln", "trust": '[keys.a]\npublic = "x"\n', "credentialsSecret": "object-store"},
    "server": {"apiKeysSecret": "keys", "args": ["--threads", "8"]},
    "autoscaling": {"enabled": True},
    "serviceAccount": {"annotations": {"cloud/identity": "kiln"}},
    "nodeSelector": {"kiln/sku": "cpu-avx512"},
}
CLAIM: dict[str, Any] = {
    "bundles": [{"name": "chat", "path": "smollm2"}],
    "claim": "bundles",
    "server": {"allowAnonymous": True},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "runtimeClassName": "nvidia",
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_what_the_dockerfile_copies_is_there_and_in_the_context() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in context
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}" in context


def test_the_image_runs_commands_that_kiln_has() -> None:
    entries = re.findall(r"^ENTRYPOINT \[(.*)\]$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    commands = [[word.strip(' "') for word in entry.split(",")] for entry in entries]
    assert commands[0] == ["kiln", "nightly"]
    parsed(commands[1][1:], ["bundle"])


def parsed(*arguments: list[str]) -> dict[str, Any]:
    """Options of the subcommand that these arguments name. Raises where click does not take them."""
    command: click.Command = kiln_group
    words = [word for part in arguments for word in part]
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    return command.make_context("kiln", words).params


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def rendered(chart: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes objects by kind."""
    texts = chart.render(values, name="demo", namespace="prod")
    found = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {one["kind"]: one for one in found if one}


def documented() -> dict[str, Any]:
    """The values that docs/deploy.md shows."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    (example,) = (
        block for block in re.findall(r"(?:^    .*\n|^\n)+", text, flags=re.MULTILINE) if "    bundles:\n" in block
    )
    return yaml.safe_load(textwrap.dedent(example))


@pytest.mark.parametrize("values", [REGISTRY, CLAIM, documented()], ids=["registry", "claim", "documented"])
def test_helm_and_kubernetes_accept_the_chart(chart: Any, values: dict[str, Any]) -> None:
    import helm_python

    validate = pytest.importorskip("kubernetes_validate")
    lint = helm_python.lint(CHART, values, strict=True)
    assert lint["errors"] == []
    assert {message["error"] for message in lint["messages"]} <= {"icon is recommended"}
    objects = rendered(chart, values)
    assert {"Deployment", "Service", "ServiceAccount"} <= set(objects)
    for one in objects.values():
        validate.validate(one, KUBERNETES, strict=True)


def test_pods_pull_from_the_registry_and_serve_what_they_pulled(chart: Any) -> None:
    objects = rendered(chart, REGISTRY)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    pulls = [parsed(one["command"][1:], one["args"]) for one in pod["initContainers"]]
    assert [(pull["model"], pull["version"], str(pull["out"])) for pull in pulls] == [
        ("smollm2", None, "/bundles/chat"),
        ("minilm", 7, "/bundles/embed"),
    ]
    assert objects["ConfigMap"]["data"]["trusted"] == REGISTRY["registry"]["trust"]
    (container,) = pod["containers"]
    serve = parsed(["serve"], container["args"])
    assert [str(path) for path in serve["bundles"]] == [str(pull["out"]) for pull in pulls]
    assert (serve["names"], serve["threads"], serve["open_metrics"]) == (("chat", "embed"), 8, True)
    assert serve["api_keys"] is not None
    assert pod["terminationGracePeriodSeconds"] > serve["drain_timeout"] + 10
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == objects["Deployment"]["metadata"]["name"]
    assert "replicas" not in objects["Deployment"]["spec"]


def test_pods_mount_a_claim(chart: Any) -> None:
    objects = rendered(chart, CLAIM)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert "ConfigMap" not in objects
    serve = parsed(["serve"], pod["containers"][0]["args"])
    assert [str(path) for path in serve["bundles"]] == ["/bundles/smollm2"]
    assert serve["allow_anonymous"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "bundles", "readOnly": True}


def test_probes_and_annotations_name_paths_that_the_server_has(chart: Any) -> None:
    from engines.server.app import create_app

    routes = create_app({}).openapi()["paths"]
    template = rendered(chart, REGISTRY)["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    paths = {container[probe]["httpGet"]["path"] for probe in probes}
    paths.add(template["metadata"]["annotations"]["prometheus.io/path"])
    assert paths == {"/health/live", "/health/ready", "/metrics"}
    assert paths <= set(routes)
    assert re.findall(r"127.0.0.1:8000(/[a-z/]+)", DOCKERFILE.read_text()) == ["/health/ready"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bundles": []}, "bundles is empty"),
        ({"claim": "volume"}, "both set"),
        ({"registry": {"url": ""}}, "neither registry.url nor claim"),
        ({"registry": {"url": "s3://a/b"}}, "registry.trust is empty"),
        ({"server": {}}, "server.apiKeysSecret is empty"),
        ({"bundles": [{"name": "a", "path": "a"}]}, "bundle a has a path"),
        ({"bundels": []}, "bundels"),
    ],
)
def test_values_that_do_not_go_together_are_refused(chart: Any, changes: dict[str, Any], message: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=message):
        chart.render({**REGISTRY, **changes}, name="demo", namespace="prod")
