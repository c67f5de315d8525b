"""The table at the start of a run, against numbers worked by hand."""

from jaxrl_llm.checks import MeshShape
from jaxrl_llm.config import Config, override, resolve
from jaxrl_llm.summary import kl_place, models, start_lines


def config(*pairs: tuple[str, str]) -> Config:
    c = Config()
    for path, text in pairs:
        c = override(c, path, text)
    return resolve(c)


GRPO = (
    ("algorithm.adv_estimator", "grpo"),
    ("rollout.n", "5"),
    ("data.max_response_length", "1024"),
    ("actor.ppo_micro_batch_size_per_device", "80"),
    ("actor.use_kl_loss", "true"),
)


def table(c: Config, **changes: int) -> dict[str, tuple[str, str]]:
    numbers = {
        "steps_per_epoch": 7,
        "total_steps": 105,
        "parameters": 6_910_000_000,
        "row_tokens": 5632,
        **changes,
    }
    return {
        name: (value, how) for name, value, how in start_lines(c, MeshShape(1, 8, 1), **numbers)
    }


def test_the_reference_run_in_numbers():
    rows = table(config(*GRPO))
    assert rows["prompts per step"][0] == "1,024"
    assert rows["trajectories per step"][0] == "5,120"
    assert rows["optimizer steps per rollout"][0] == "4"  # 1024 / 256
    assert rows["tokens per pass"][0] == "at most 5,767,168"  # 1024 x 512 + 5120 x 1024
    assert rows["tokens per device at once"] == (
        "5,632",
        "8 data shards; actor.use_dynamic_bsz sets another size",
    )
    assert rows["devices"] == ("8", "data 1 x fsdp 8 x tensor 1")
    assert rows["steps"] == ("105", "7 steps per pass over the prompts")
    assert rows["models loaded"] == ("actor, reference", "6,910.00 M parameters each")
    assert "0.2" in rows["advantages"][1]
    assert "critic warm-up" not in rows


def test_prompts_of_their_own_count_once_per_trajectory():
    rows = table(config(*GRPO, ("model.use_prefix_sharing", "false")))
    assert rows["tokens per pass"][0] == "at most 7,864,320"  # 5120 x (512 + 1024)
    assert "one per trajectory" in rows["tokens per pass"][1]


def test_passes_multiply_the_optimizer_steps():
    assert table(config(*GRPO, ("actor.ppo_epochs", "3")))["optimizer steps per rollout"][0] == "12"


def test_the_critic_line_and_its_warm_up():
    rows = table(config(("trainer.critic_warmup", "5")))
    assert rows["models loaded"][0] == "actor, critic"
    assert rows["critic warm-up"][0] == "5 steps"
    assert "critic warm-up" not in table(config(*GRPO, ("trainer.critic_warmup", "5")))


def test_where_kl_acts():
    assert kl_place(config()) == ("nowhere", "no reference is loaded")
    assert kl_place(config(*GRPO)) == ("in the loss", "k3, coefficient 0.001 (fixed)")
    place, how = kl_place(
        config(
            *GRPO, ("algorithm.use_kl_in_reward", "true"), ("algorithm.kl_ctrl.type", "adaptive")
        )
    )
    assert place == "in the reward and in the loss"
    assert how == "k1, coefficient 0.001 (adaptive); k3, coefficient 0.001 (adaptive)"


def test_models_held():
    assert models(config()) == ["actor", "critic"]
    assert models(config(*GRPO)) == ["actor", "reference"]
