"""Serve applications of a deployment: one for the HTTP side, one of engine replicas for each version in service.

A version's application is never changed, only made and deleted, because Serve restarts every replica of one that is
deployed again; its number of replicas follows the autoscaling policy, which the steward can overrule. Needs Ray.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.ingress import Ingress
from pipeline.deploy.options import DeployOptions, Version
from pipeline.deploy.replica import EngineReplica
from pipeline.deploy.request_router import PATH as ROUTER
from pipeline.deploy.rollout import Plan, Traffic
from pipeline.deploy.scaling import LoadPolicy
from pipeline.deploy.steward import DEPLOYMENT, NAMESPACE, Report, name_of, start_steward, steward_of
from pipeline.ray_cluster import ray_module, serve_module
from plugins.errors import KilnError, first_line

_POLICY = f"{LoadPolicy.__module__}:{LoadPolicy.__name__}"
_METRICS_SECONDS, _LOOK_BACK = 1.0, 10.0
_HEALTH_SECONDS = 2.0
_STARTS = 3
"""Of a replica, before its version is given up: a bundle that cannot be opened stays so."""


@dataclass(frozen=True)
class State:
    """What runs: options, the versions' applications by name with their replicas, and the steward's report."""

    options: DeployOptions
    traffic: Traffic
    replicas: Mapping[str, Mapping[str, int]]
    report: Report


def start_serve(host: str, port: int) -> None:
    """Serve's controller and proxies, where they do not run yet; the address is that of the first who starts them."""
    serve = serve_module()

    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})


def up(options: DeployOptions, source: BundleSource) -> Version:
    """Start an application with its first version. Raises KilnError where one runs, or this one does not come up."""
    ray = ray_module()
    if find(options.app) is not None:
        raise KilnError(
            f"{options.app} runs already; update it: kiln deploy ray roll, end it: kiln deploy ray down, or give "
            "another --app"
        )
    steward, version = start_steward(options.app), Version.of(options.app, source)
    try:
        ray.get(steward.tell.remote(version.app, options.count.fixed))
        start_version(options, version, options.count.least)
        ray.get(steward.direct.remote(version.app))
        _run(_ingress(options, source), options.app, "/")
    except BaseException:
        down(options.app)
        raise
    return version


def require_answer(host: str, port: int, seconds: float = 60.0) -> str:
    """The address at which the application takes requests. Raises KilnError where nothing answers there in time."""
    import httpx

    url = f"http://{host}:{port}"
    here = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    end, found = time.monotonic() + seconds, ""
    while True:
        try:
            found = str(httpx.get(f"http://{here}:{port}/health/ready", timeout=seconds).status_code)
        except httpx.TransportError as error:
            found = first_line(error)
        if found == "200":
            return url
        if time.monotonic() > end:
            raise KilnError(
                f"the replicas are up, but {url} answers {found}; Serve listens where it was started first: give its "
                "--host and --port, or end it: serve shutdown"
            )
        time.sleep(_METRICS_SECONDS)


def start_version(options: DeployOptions, version: Version, replicas: int) -> None:
    """Returns when `replicas` of it take requests. Raises KilnError where they do not, and then there are none."""
    try:
        _run(_engines(options, version, replicas), version.app, None)
    except BaseException:
        delete(version.app)
        raise


def prepare(options: DeployOptions, new: Version, plan: Plan) -> None:
    """Start a new version for an update's first step. Raises as `start_version`."""
    ray, first = ray_module(), plan.sizes(plan.steps[0])[new.app]
    steward = steward_of(options.app)
    ray.get(steward.tell.remote(new.app, first))  # before its replicas ask
    try:
        start_version(options, new, first)
    except BaseException:
        ray.get(steward.forget.remote(new.app))
        raise


def settle(options: DeployOptions, keep: str, remove: str) -> None:
    """After an update: one version stays, in its usual size, the other one ends after its requests."""
    ray, steward = ray_module(), steward_of(options.app)
    ray.get(steward.tell.remote(keep, options.count.fixed))
    delete(remove)
    ray.get(steward.forget.remote(remove))


def report(app: str) -> Report:
    """The steward's."""
    return ray_module().get(steward_of(app).report.remote())


def abort(app: str) -> bool:
    """End an update by going back; whether there was one."""
    return ray_module().get(steward_of(app).abort.remote("somebody ended it"))


def begin(app: str, plan: Plan) -> None:
    """Begin an update that was prepared. Raises KilnError while another one is under way."""
    ray = ray_module()

    try:
        ray.get(steward_of(app).begin.remote(plan))
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, KilnError) else KilnError(first_line(error))) from error


def find(app: str) -> State | None:
    """None where no application of that name runs."""
    serve = serve_module()

    applications = serve.status().applications
    if app not in applications:
        return None
    options, traffic = serve.get_app_handle(app).deployed.remote().result(timeout_s=60)
    found_out = report(app)
    versions = {
        name: dict(found.deployments[DEPLOYMENT].replica_states)
        for name, found in applications.items()
        if name.startswith(f"{app}-") and DEPLOYMENT in found.deployments
    }
    return State(options, found_out.traffic or traffic, versions, found_out)


def require(app: str) -> State:
    """Raises KilnError where no application of that name runs."""
    serve = serve_module()

    found = find(app)
    if found is None:
        known = ", ".join(name for name in serve.status().applications if "-" not in name) or "none"
        raise KilnError(f"no application {app} runs on this cluster (there is: {known}); start it: kiln deploy ray up")
    return found


def delete(app: str) -> None:
    """A version or an HTTP side, after its requests; nothing where there is none."""
    serve = serve_module()

    if app in serve.status().applications:
        serve.delete(app)


def down(app: str) -> list[str]:
    """Everything of an application, the HTTP side first; names of what was there."""
    ray = ray_module()
    serve = serve_module()

    names = [name for name in serve.status().applications if name == app or name.startswith(f"{app}-")]
    for name in sorted(names, key=len):
        serve.delete(name)
    try:
        ray.kill(ray.get_actor(name_of(app), namespace=NAMESPACE))
    except ValueError:
        return names
    return [*names, name_of(app)]


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


def _run(application: Any, name: str, route: str | None) -> None:
    serve = serve_module()

    try:
        serve.run(application, name=name, route_prefix=route)
    except RuntimeError as error:  # Serve's, with the replica's traceback in it
        told = serve.status().applications.get(name)
        messages = [] if told is None else [each.message for each in told.deployments.values() if each.message]
        raise KilnError(f"{name} did not come up: {_cause(messages) or first_line(error)}; see Ray's logs") from error


def _cause(messages: list[str]) -> str:
    """The last line of a traceback that says an error."""
    lines = [line.strip() for message in messages for line in message.splitlines() if "Error" in line]
    return lines[-1] if lines else ""
