"""The settings of a run, one frozen dataclass per config section; standard library only.

A field without a mark shapes the numbers of a run (*identity*: model, data, algorithm, optimizer, batch, seed); fields made
with `operational` say where and how often something is written, and may change when a run is resumed.

Left out on purpose: any check that involves two fields (those live in `jaxrl_llm.checks`, so that all problems of a
configuration are reported together) and any default that another field decides (`None`, resolved in `jaxrl_llm.config`).
"""

from jaxrl_llm.knobs.actor import ActorKnobs
from jaxrl_llm.knobs.algorithm import AlgorithmKnobs, KLControlKnobs
from jaxrl_llm.knobs.critic import CriticKnobs
from jaxrl_llm.knobs.data import DataKnobs
from jaxrl_llm.knobs.distributed import DistributedKnobs
from jaxrl_llm.knobs.mesh import MeshKnobs
from jaxrl_llm.knobs.model import ModelKnobs
from jaxrl_llm.knobs.optim import OptimKnobs
from jaxrl_llm.knobs.ref import RefKnobs
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.knobs.rollout import RolloutKnobs
from jaxrl_llm.knobs.trainer import TrainerKnobs
from jaxrl_llm.knobs.validation import ValidationKnobs

__all__ = [
    "ActorKnobs",
    "AlgorithmKnobs",
    "CriticKnobs",
    "DataKnobs",
    "DistributedKnobs",
    "KLControlKnobs",
    "MeshKnobs",
    "ModelKnobs",
    "OptimKnobs",
    "RefKnobs",
    "RewardKnobs",
    "RolloutKnobs",
    "TrainerKnobs",
    "ValidationKnobs",
]
