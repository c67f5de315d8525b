"""How a process joins the others of its run, before it touches a device.

What stands in the settings wins, then environment variables, then the cluster that JAX recognises (SLURM, Open MPI, Kubernetes, TPU
pod slices). A job of one process is never joined to anything: a shell inside an allocation runs as it would without.

Left out on purpose: starting processes (a launcher does), and jobs that go on when a process is lost.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from jaxrl_llm import roll_call
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs import DistributedKnobs

SHUTDOWN_SECONDS = 60
CONNECT_SECONDS = 60
"""How long JAX's own start may take once everybody has answered the roll call."""


@dataclass(frozen=True)
class Place:
    """Where a process stands: the coordinator, how many processes, its number, its GPUs (`None`: all of the host)."""

    coordinator: str
    count: int
    number: int
    devices: tuple[int, ...] | None = None


Detect = Callable[[Mapping[str, str], int], Place | None]
"""`(environment, seconds to look) -> Place`; `None` where no cluster is recognised or it holds one process."""


def place(knobs: DistributedKnobs, environment: Mapping[str, str], detect: Detect) -> Place | None:
    """This process's place among several, or `None` for a run of one process. `ConfigError` with everything that is wrong."""
    if knobs.enable == "off":
        return None
    problems: list[str] = []

    def number(name: str, variable: str) -> int | None:
        text = environment.get(variable)
        value = getattr(knobs, name)
        if value is not None or not text:
            return value
        if not text.strip().isdecimal():
            problems.append(f"{variable}: got {text!r}, need a whole number; mend or unset it")
            return None
        return int(text)

    address = knobs.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS") or None
    count = number("num_processes", "JAX_NUM_PROCESSES")
    me = number("process_id", "JAX_PROCESS_ID")
    devices = knobs.local_device_ids
    ids = environment.get("JAX_LOCAL_DEVICE_IDS")
    if devices is None and ids:
        if not all(part.strip().isdecimal() for part in ids.split(",")):
            problems.append(f"JAX_LOCAL_DEVICE_IDS: got {ids!r}, need numbers like 0,1")
        else:
            devices = tuple(int(part) for part in ids.split(","))
    if problems:
        raise ConfigError(problems)
    if None in (address, count, me) and count != 1:
        found = detect(environment, knobs.initialization_timeout)
        if found is not None:
            address = address or found.coordinator
            count = found.count if count is None else count
            me = found.number if me is None else me
            devices = found.devices if devices is None else devices
    if address is None and count is None and me is None:
        if knobs.enable == "on":
            raise ConfigError(
                "distributed.enable = on, but no cluster of several processes is recognised, need coordinator_address, num_processes "
                "and process_id; set them, or start under srun, mpirun or on a TPU pod slice"
            )
        return None
    if count == 1 and knobs.enable == "auto" and not me:
        return None
    problems = _problems(address, count, me)
    if problems:
        raise ConfigError(problems)
    assert address is not None and count is not None and me is not None
    return Place(address, count, me, devices)


def _problems(address: str | None, count: int | None, me: int | None) -> list[str]:
    named = {
        "coordinator_address (JAX_COORDINATOR_ADDRESS)": address,
        "num_processes (JAX_NUM_PROCESSES)": count,
        "process_id (JAX_PROCESS_ID)": me,
    }
    missing = [name for name, value in named.items() if value is None]
    given = [f"{name} = {value}" for name, value in named.items() if value is not None]
    if missing:
        return [
            f"distributed: got {', '.join(given)}, need {' and '.join(missing)} too, as no cluster fills them in; set all three on "
            "every process, or none of them"
        ]
    assert address is not None and count is not None and me is not None
    problems = []
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        problems.append(
            f"distributed.coordinator_address: got {address!r}, need HOST:PORT of process 0, for instance 10.0.0.1:1234"
        )
    if count < 1:
        problems.append(f"distributed.num_processes: got {count}, need 1 or more")
    elif not 0 <= me < count:
        problems.append(
            f"distributed.process_id: got {me} of {count} processes, need a number from 0 to {count - 1}"
        )
    return problems


def join(knobs: DistributedKnobs, say: Callable[[str], None]) -> None:
    """Join the other processes, if there are any. Must come before any device is touched.

    Raises `ConfigError` (exit 64) for settings that do not fit together and where not everybody comes in time.
    """
    where = place(knobs, os.environ, partial(recognised, say=say))
    if where is None:
        return
    import jax

    roll_call.meet(where.coordinator, where.number, where.count, knobs.initialization_timeout)
    # JAX's preemption service would catch SIGTERM and let the program go on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=where.coordinator,
            num_processes=where.count,
            process_id=where.number,
            local_device_ids=None if where.devices is None else list(where.devices),
            cluster_detection_method="deactivate",
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=knobs.heartbeat_timeout,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RuntimeError as problem:
        raise ConfigError(
            f"distributed: process {where.number} of {where.count} could not start JAX's coordination at {where.coordinator} "
            f"({str(problem).splitlines()[0]}); need that port of process 0 free and reachable"
        ) from problem


# Clusters ---------------------------------------------------------------------------------------------------------------


def recognised(
    environment: Mapping[str, str], seconds: int, say: Callable[[str], None]
) -> Place | None:
    """What the cluster around this process says, where JAX recognises one with more than one process."""
    from jax._src.clusters import ClusterEnv

    port = environment.get("JAX_COORDINATOR_PORT")
    for cluster in ClusterEnv._cluster_types:
        if cluster.opt_in_only_method:
            continue
        try:
            if not cluster.is_env_present():
                continue
            count = tasks(environment, cluster.name, cluster.get_process_count())
            if count < 2:
                return None
            return Place(
                cluster.get_coordinator_address(seconds, port),
                count,
                cluster.get_process_id(),
                own_devices(environment, cluster.get_local_process_id()),
            )
        except (
            Exception
        ) as problem:  # whatever a cluster's service answers, one process can still run
            say(
                f"warning: {cluster.__name__} is recognised, but does not say how many processes there are ({problem}); going on as "
                "one process. Set distributed.coordinator_address, num_processes and process_id if there should be more"
            )
            return None
    return None


def tasks(environment: Mapping[str, str], cluster: str, said: int) -> int:
    """Processes of this step of the job: under SLURM an allocation may hold more tasks than the step (an interactive shell is one)."""
    step = environment.get("SLURM_STEP_NUM_TASKS", "")
    return int(step) if cluster == "slurm" and step.isdecimal() else said


def own_devices(environment: Mapping[str, str], local: int | None) -> tuple[int, ...] | None:
    """The GPU of this process where a launcher put several processes on the host; `None` where it is alone or sees its own GPU only."""
    per_host = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
        "OMPI_COMM_WORLD_LOCAL_SIZE", ""
    )
    alone = per_host == "1" or (per_host.startswith("1(") and "," not in per_host)
    if local is None or alone:
        return None
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = environment.get(variable)
        if visible and local >= len(visible.split(",")):
            return None
    return (local,)
