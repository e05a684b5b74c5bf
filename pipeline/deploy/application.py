"""Serve applications of a deployment: one for the HTTP side, one of engine replicas for each version in service.

A version's application is never changed, only made and deleted, because Serve restarts every replica of one that is
deployed again; its number of replicas follows the autoscaling policy, which the steward can overrule. Needs Ray.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.ingress import Ingress
from pipeline.deploy.options import DeployOptions, Version
from pipeline.deploy.replica import EngineReplica
from pipeline.deploy.request_router import PATH as ROUTER
from pipeline.deploy.rollout import Plan, Traffic
from pipeline.deploy.scaling import LoadPolicy
from pipeline.deploy.standing import DEPLOYMENT, Standing, standing_of
from pipeline.deploy.steward import NAMESPACE, Report, name_of, start_steward, steward_of
from pipeline.ray_cluster import nodes, ray_module, serve_module
from plugins.errors import KilnError, first_line

_POLICY = f"{LoadPolicy.__module__}:{LoadPolicy.__name__}"
_METRICS_SECONDS, _LOOK_BACK = 1.0, 10.0
_HEALTH_SECONDS = 2.0
_STARTS = 3
"""Of a replica, before its version is given up: a bundle that cannot be opened stays so."""
_HTTP = "http"
_LOOK_SECONDS, _ANSWER_SECONDS = 0.5, 60.0

Told = Callable[[str], None]
"""Is told what is waited for, when that changes."""


@dataclass(frozen=True)
class State:
    """What runs: options, the versions' applications by name with their replicas, and the steward's report."""

    options: DeployOptions
    traffic: Traffic
    replicas: Mapping[str, Mapping[str, int]]
    report: Report


def up(
    options: DeployOptions,
    source: BundleSource,
    host: str,
    port: int,
    patience: float = 1800.0,
    told: Told = lambda _: None,
) -> str:
    """Start an application with its first version; the address at which it takes requests.

    Raises KilnError where one runs, or where replicas do not come up within `patience` seconds; then nothing stays.
    """
    ray = ray_module()
    _start_serve(host, port)
    _require_room(options.app)
    steward, version = start_steward(options.app), Version.of(options.app, source)
    try:
        ray.get(steward.tell.remote(version.app, options.count.fixed))
        _deploy(_engines(options, version, options.count.least), version.app, None)
        _wait(version.app, DEPLOYMENT, patience, told)
        ray.get(steward.direct.remote(version.app))
        _deploy(_ingress(options, source), options.app, "/")
        _wait(options.app, _HTTP, patience, told)
        return _answering(host, port)
    except BaseException:
        told("what was begun is taken down")
        down(options.app)
        raise


def _start_serve(host: str, port: int) -> None:
    """Serve's controller and proxies, where they do not run yet; the address is that of the first who starts them.

    Nodes that share a machine share its port: which of their proxies gets a connection is the kernel's choice, and one
    whose node has no replica left takes some along when it ends. So there one proxy runs, beside the head.
    """
    addresses = [node.address for node in nodes()]
    location = "EveryNode" if len(set(addresses)) == len(addresses) else "HeadOnly"
    serve_module().start(proxy_location=location, http_options={"host": host, "port": port})


def _require_room(app: str) -> None:
    for name, found in serve_module().status().applications.items():
        if name == app:
            raise KilnError(f"{name} runs already; update it: kiln deploy ray roll, or end it: kiln deploy ray down")
        if _HTTP in found.deployments:
            raise KilnError(
                f"{name} answers at / of this cluster; end it (kiln deploy ray down --app {name}), or use another one"
            )


def _answering(host: str, port: int) -> str:
    import httpx

    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    here = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    end, found = time.monotonic() + _ANSWER_SECONDS, ""
    while found != "200":
        try:
            found = str(httpx.get(f"{here}/health/ready", timeout=_ANSWER_SECONDS).status_code)
        except httpx.TransportError as error:
            found = first_line(error)
        if found != "200" and time.monotonic() > end:
            raise KilnError(
                f"the replicas came up, but {url} answers {found}; Serve listens where it was started first: give its "
                "--host and --port, or end it: serve shutdown"
            )
        time.sleep(_LOOK_SECONDS)
    return url


def begin(options: DeployOptions, new: Version, plan: Plan) -> None:
    """Begin an update: the steward goes on with it. Raises KilnError while another one is under way."""
    ray, steward = ray_module(), steward_of(options.app)
    try:
        ray.get(steward.begin.remote(plan))
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, KilnError) else KilnError(first_line(error))) from error
    try:
        _deploy(_engines(options, new, plan.sizes(plan.steps[0])[new.app]), new.app, None)
    except BaseException as error:
        ray.get(steward.abort.remote(f"its replicas could not be asked for: {first_line(error)}"))
        raise


def settle(options: DeployOptions, keep: str, remove: str) -> None:
    """After an update: one version stays, in its usual size, the other one ends after its requests."""
    ray_module().get(steward_of(options.app).tell.remote(keep, options.count.fixed))
    remove_version(options.app, remove)


def remove_version(app: str, version: str) -> None:
    """After its requests; nothing where there is none."""
    _delete(version)
    ray_module().get(steward_of(app).forget.remote(version))


def report(app: str) -> Report:
    """The steward's."""
    return ray_module().get(steward_of(app).report.remote())


def abort(app: str) -> bool:
    """End an update by going back; whether there was one."""
    return ray_module().get(steward_of(app).abort.remote("somebody ended it"))


def find(app: str) -> State | None:
    """None where no application of that name runs. Raises KilnError where its HTTP side does not answer."""
    serve = serve_module()
    applications = serve.status().applications
    if app not in applications:
        return None
    try:
        options, traffic = serve.get_app_handle(app).deployed.remote().result(timeout_s=_ANSWER_SECONDS)
    except TimeoutError as error:
        state = standing_of(app, _HTTP)
        raise KilnError(
            f"the HTTP side of {app} does not answer ({state}); wait for it, or end it: kiln deploy ray down"
        ) from error
    found_out = report(app)
    versions = {
        name: dict(found.deployments[DEPLOYMENT].replica_states)
        for name, found in applications.items()
        if name.startswith(f"{app}-") and DEPLOYMENT in found.deployments
    }
    return State(options, found_out.traffic or traffic, versions, found_out)


def require(app: str) -> State:
    """Raises KilnError where no application of that name runs."""
    found = find(app)
    if found is None:
        applications = serve_module().status().applications
        known = ", ".join(name for name, each in applications.items() if _HTTP in each.deployments) or "none"
        raise KilnError(f"no application {app} runs on this cluster (there is: {known}); start it: kiln deploy ray up")
    return found


def down(app: str) -> list[str]:
    """Everything of an application, the HTTP side first; names of what was there."""
    ray = ray_module()
    applications = serve_module().status().applications
    names = [name for name in applications if name == app or name.startswith(f"{app}-")]
    for name in sorted(names, key=len):
        _delete(name)
    try:
        ray.kill(ray.get_actor(name_of(app), namespace=NAMESPACE))
    except ValueError:
        return names
    return [*names, name_of(app)]


def _delete(name: str) -> None:
    serve = serve_module()
    if name not in serve.status().applications:
        return
    with suppress(TimeoutError):  # Serve waits for a minute, requests may take longer
        serve.delete(name)
    while name in serve.status().applications:
        time.sleep(_LOOK_SECONDS)


def _engines(options: DeployOptions, version: Version, replicas: int) -> Any:
    serve = serve_module()
    count, config = options.count, serve.config
    scaling = config.AutoscalingConfig(
        min_replicas=1,  # in an update it may be fewer than count.least, which the policy knows
        initial_replicas=replicas,
        max_replicas=count.most,
        metrics_interval_s=_METRICS_SECONDS,
        look_back_period_s=_LOOK_BACK,
        upscale_delay_s=count.up_delay,
        downscale_delay_s=0.0 if count.fixed else count.down_delay,
        policy=config.AutoscalingPolicy(
            policy_function=_POLICY, policy_kwargs={"least": count.least, **asdict(count.targets)}
        ),
    )
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        autoscaling_config=scaling,
        ray_actor_options=dict(options.actor),
        max_ongoing_requests=options.ongoing,
        max_queued_requests=options.waiting,
        request_router_config=config.RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs=asdict(options.routing)
        ),
        graceful_shutdown_timeout_s=options.drain,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_SECONDS,
        max_constructor_retry_count=_STARTS,
        logging_config={"enable_access_log": False},  # the HTTP side has a line for every request
    )
    return deployment.bind(version.source, options.engine, options.http.model, options.app)


def _ingress(options: DeployOptions, source: BundleSource) -> Any:
    serve = serve_module()

    deployment = serve.deployment(
        serve.ingress()(Ingress),
        name="http",
        num_replicas=options.http.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=options.http.config.max_concurrent + 64,  # beyond it the server itself says 429
        graceful_shutdown_timeout_s=options.drain,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(options, source)


def _deploy(application: Any, name: str, route: str | None) -> None:
    serve = serve_module()
    serve.run_many([serve.RunTarget(application, name, route)], wait_for_applications_running=False)


def _wait(name: str, deployment: str, patience: float, told: Told) -> None:
    """Returns when it takes requests. Raises KilnError where it does not."""
    end, said = time.monotonic() + patience, ""
    while (found := standing_of(name, deployment) or Standing()).status != "RUNNING":
        if found.failed:
            raise KilnError(f"{name} did not come up: {found.message}; see Ray's logs")
        if time.monotonic() > end:
            raise KilnError(f"{name} did not come up within {patience:g} s: {found}")
        if (text := f"{name}: {found}") != said:
            told(said := text)
        time.sleep(_LOOK_SECONDS)
