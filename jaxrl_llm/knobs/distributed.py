"""`distributed`: how the processes of one run find each other."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class DistributedKnobs:
    """Where this process stands among the processes of the run; environment variables and the cluster fill what is `None`."""

    enable: Literal["auto", "on", "off"] = operational("auto")
    """`auto` joins other processes where an address is given or where SLURM, Open MPI, Kubernetes or a TPU pod slice says that there
    are some; `on` refuses to run without them; `off` runs as one process."""
    coordinator_address: str | None = operational(None)
    """`HOST:PORT` of process 0, the same on every process; `None` takes `JAX_COORDINATOR_ADDRESS`, then what the cluster says."""
    num_processes: int | None = operational(None)
    """Processes of the run; `None` takes `JAX_NUM_PROCESSES`, then what the cluster says."""
    process_id: int | None = operational(None)
    """This process's number, from 0; `None` takes `JAX_PROCESS_ID`, then what the cluster says."""
    local_device_ids: tuple[int, ...] | None = operational(None)
    """GPUs of the host that this process owns; `None` takes `JAX_LOCAL_DEVICE_IDS`, then one per process where the cluster starts
    several on a host, else all."""
    initialization_timeout: int = operational(300)
    """Seconds in which all processes must have come."""
    heartbeat_timeout: int = operational(30)
    """Seconds without a sign of life after which a process counts as dead; the others then end."""
    wait_timeout: int = operational(1800)
    """Seconds that processes wait for each other in the middle of a step (for a slower rollout or slower grading) before they give
    up, naming who is missing."""
    watchdog_seconds: int | None = operational(3600)
    """Seconds (or ten times the median step, if that is more) in which no process gets on, after which all of them end with exit 70,
    naming the one that stands still; `None` waits for ever."""
