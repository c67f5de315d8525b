"""Where a process stands: settings before environment before cluster, one process for everything that holds one, words for the rest."""

import os
from types import SimpleNamespace

import pytest

from jaxrl_llm import joining
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.joining import Place
from jaxrl_llm.knobs import DistributedKnobs

ADDRESS = "10.0.0.1:1234"
WHOLE = {"coordinator_address": ADDRESS, "num_processes": 4, "process_id": 2}
VARIABLES = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.9:99",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "1",
    "JAX_LOCAL_DEVICE_IDS": "2, 3",
}
CLUSTER = Place("node0:7", 8, 5, (1,))


def nothing(environment, seconds):
    return None


def place(environment=None, detect=nothing, **knobs):
    return joining.place(DistributedKnobs(**knobs), environment or {}, detect)


def test_one_process_is_the_default():
    assert place() is None
    assert place({"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": ""}) is None


def test_settings_are_enough_and_no_cluster_is_asked():
    def asked(environment, seconds):
        raise AssertionError

    assert place(**WHOLE, detect=asked) == Place(ADDRESS, 4, 2)
    assert place(**WHOLE, local_device_ids=(3,)).devices == (3,)


def test_variables_fill_what_settings_leave_open():
    assert place(VARIABLES) == Place("10.0.0.9:99", 3, 1, (2, 3))
    assert place(VARIABLES, **WHOLE, local_device_ids=(0,)) == Place(ADDRESS, 4, 2, (0,))


def test_a_cluster_fills_what_is_left():
    assert place(detect=lambda *_: CLUSTER) == CLUSTER
    some = place({"JAX_COORDINATOR_ADDRESS": ADDRESS}, detect=lambda *_: CLUSTER)
    assert some == Place(ADDRESS, 8, 5, (1,))


def test_off_is_one_process_whatever_there_is():
    assert place(VARIABLES, detect=lambda *_: CLUSTER, enable="off", **WHOLE) is None


def test_on_needs_others():
    with pytest.raises(ConfigError, match=r"enable = on, but no cluster .* is recognised"):
        place(enable="on")
    assert place(enable="on", coordinator_address=ADDRESS, num_processes=1, process_id=0) == Place(
        ADDRESS, 1, 0
    )


def test_a_count_of_one_is_one_process():
    assert place(coordinator_address=ADDRESS, num_processes=1, process_id=0) is None
    assert place(num_processes=1) is None


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"coordinator_address": ADDRESS}, r"need num_processes .* and process_id .* too"),
        (
            {"coordinator_address": ADDRESS, "num_processes": 2},
            r"need process_id \(JAX_PROCESS_ID\) too",
        ),
        ({"num_processes": 2, "process_id": 0}, r"need coordinator_address"),
        (WHOLE | {"process_id": 4}, r"process_id: got 4 of 4 processes, need a number from 0 to 3"),
        (WHOLE | {"process_id": -1}, r"process_id: got -1 of 4"),
        (WHOLE | {"num_processes": 0}, r"num_processes: got 0, need 1 or more"),
        (WHOLE | {"num_processes": 1}, r"process_id: got 2 of 1"),
        (WHOLE | {"coordinator_address": "10.0.0.1"}, r"need HOST:PORT"),
        (WHOLE | {"coordinator_address": "a:70000"}, r"need HOST:PORT"),
        (WHOLE | {"coordinator_address": ":80"}, r"need HOST:PORT"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(knobs, said):
    with pytest.raises(ConfigError, match=said):
        place(**knobs)


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(ConfigError, match=rf"{name}: got 'two'"):
        place(VARIABLES | {name: "two"})


# Clusters as JAX recognises them ---------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture
def recognised(monkeypatch):
    """What a cluster says for an environment of its variables alone."""

    def look(variables):
        for name in os.environ:
            if name.startswith(
                ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "JAX_COORDINATOR", "CUDA_")
            ):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        said: list[str] = []
        return joining.recognised(os.environ, 5, said.append), said

    return look


def test_no_cluster(recognised):
    assert recognised({}) == (None, [])


def test_tasks_of_slurm(recognised):
    found, said = recognised(SLURM)
    assert (found.coordinator.partition(":")[0], found.count, found.number) == ("node003", 4, 3)
    assert found.devices == (1,) and said == []
    assert recognised(SLURM | {"JAX_COORDINATOR_PORT": "1234"})[0].coordinator == "node003:1234"


def test_one_task_per_host_owns_its_devices(recognised):
    assert recognised(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"})[0].devices is None


def test_a_task_that_sees_its_own_gpu_only_takes_it(recognised):
    assert recognised(SLURM | {"CUDA_VISIBLE_DEVICES": "0"})[0].devices is None
    assert recognised(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"})[0].devices == (1,)


def test_a_shell_inside_an_allocation_is_one_process(recognised):
    """`srun --pty bash` in an allocation of four tasks is a step of one, and a job of one task is none."""
    assert recognised(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == (None, [])
    assert recognised(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}) == (None, [])
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert recognised(batch) == (None, [])


def test_ranks_of_open_mpi(recognised):
    found, said = recognised(
        {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        }
    )
    assert (found.coordinator.partition(":")[0], found.count, found.number, found.devices) == (
        "10.96.0.1",
        2,
        1,
        None,
    )
    assert said == []


def test_a_cluster_that_cannot_say_leaves_one_process_and_a_warning(recognised):
    found, said = recognised(SLURM | {"SLURM_NTASKS": "many"})
    assert found is None and len(said) == 1
    assert said[0].startswith("warning: SlurmCluster is recognised, but does not say")


# Joining -----------------------------------------------------------------------------------------------------------------------


def test_what_jax_is_told(monkeypatch):
    import jax

    told = {}
    monkeypatch.setattr(joining.roll_call, "meet", lambda *said: told.update(roll=said))
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.update({name: value}))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **said: told.update(said))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    knobs = DistributedKnobs(
        **WHOLE, local_device_ids=(1,), initialization_timeout=7, heartbeat_timeout=9
    )
    joining.join(knobs, print)
    assert told["roll"] == (ADDRESS, 2, 4, 7)
    assert told["jax_enable_preemption_service"] is False
    assert (told["coordinator_address"], told["num_processes"], told["process_id"]) == (
        ADDRESS,
        4,
        2,
    )
    assert told["local_device_ids"] == [1] and told["heartbeat_timeout_seconds"] == 9
    assert told["cluster_detection_method"] == "deactivate"
    told.clear()
    joining.join(SimpleNamespace(**vars(knobs) | {"enable": "off"}), print)  # type: ignore[arg-type]
    assert told == {}


def test_a_start_that_fails_after_the_roll_call_is_worded(monkeypatch):
    import jax

    def fails(**said):
        raise RuntimeError("UNKNOWN: Failed to start RPC server\nmore")

    monkeypatch.setattr(joining.roll_call, "meet", lambda *said: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(
        ConfigError,
        match=r"process 2 of 4 could not start .* \(UNKNOWN: Failed to start RPC server\)",
    ):
        joining.join(DistributedKnobs(**WHOLE), print)
