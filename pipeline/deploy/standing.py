"""What Serve says of an application's replicas: how many run, and what keeps the others. Needs Ray."""

from dataclasses import dataclass

from pipeline.ray_cluster import serve_module

DEPLOYMENT = "engine"
"""Name of the deployment of engine replicas in each version's Serve application."""


@dataclass(frozen=True)
class Standing:
    """`status` is Serve's word for the application, `running` counts replicas that take requests."""

    status: str = "NOT_STARTED"
    running: int = 0
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether Serve has given up to start it."""
        return self.status == "DEPLOY_FAILED"

    def __str__(self) -> str:
        """For people: `2 run`, and what Serve says of the others."""
        return f"{self.running} run" + (f"; {self.message}" if self.message else "")


def standing_of(app: str, deployment: str = DEPLOYMENT) -> Standing | None:
    """None where Serve knows no such application."""
    found = serve_module().status().applications.get(app)
    if found is None:
        return None
    each = found.deployments.get(deployment)
    running, message = (0, "") if each is None else (each.replica_states.get("RUNNING", 0), each.message)
    return Standing(str(found.status.value), running, cause_of(message or found.message))


def cause_of(message: str) -> str:
    """The last line that names an error, of a message with a traceback in it; else its first line."""
    lines = [line.strip() for line in message.splitlines()]
    errors = [line for line in lines if "Error" in line]
    return errors[-1] if errors else next(iter(lines), "")
