"""What a configuration amounts to, in numbers: the table at the start of a run. Standard library only."""

from jaxrl_llm.checks import MeshShape
from jaxrl_llm.config import Config, needs_critic, needs_reference

Line = tuple[str, str, str]


def start_lines(
    c: Config,
    mesh: MeshShape,
    *,
    steps_per_epoch: int,
    total_steps: int,
    parameters: int,
    row_tokens: int,
) -> list[Line]:
    """(name, value, how it comes about) rows for a resolved configuration on a mesh; the update runs rows of `row_tokens`."""
    prompts, n = c.data.train_batch_size, c.rollout.n
    trajectories = prompts * n
    minis = prompts // c.actor.ppo_mini_batch_size
    optimizer_steps = minis * c.actor.ppo_epochs
    longest, width = c.data.max_prompt_length, c.data.max_response_length
    heads = prompts if c.model.use_prefix_sharing else trajectories
    sharing = "one per prompt" if c.model.use_prefix_sharing else "one per trajectory"
    lines = [
        ("prompts per step", f"{prompts:,}", "data.train_batch_size"),
        ("trajectories per step", f"{trajectories:,}", f"{prompts:,} prompts x rollout.n = {n}"),
        (
            "optimizer steps per rollout",
            f"{optimizer_steps}",
            f"{minis} mini-batches of {c.actor.ppo_mini_batch_size} prompts x {c.actor.ppo_epochs} passes",
        ),
        (
            "tokens per pass",
            f"at most {heads * longest + trajectories * width:,}",
            f"{heads:,} prompts x {longest} ({sharing}) + {trajectories:,} responses x {width}",
        ),
        (
            "tokens per device at once",
            f"{row_tokens:,}",
            f"{mesh.shards} data shards; "
            + (
                "actor.ppo_max_token_len_per_device"
                if c.actor.use_dynamic_bsz
                else "actor.use_dynamic_bsz sets another size"
            ),
        ),
        (
            "advantages",
            c.algorithm.adv_estimator,
            f"loss {c.actor.loss_agg_mode}, clip -{c.actor.clip_ratio_low} / +{c.actor.clip_ratio_high}",
        ),
        ("KL acts", *kl_place(c)),
        ("models loaded", ", ".join(models(c)), f"{parameters / 1e6:,.2f} M parameters each"),
        (
            "devices",
            f"{mesh.data * mesh.fsdp * mesh.tensor * mesh.context}",
            f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
            + (f" x context {mesh.context}" if mesh.context > 1 else ""),
        ),
        ("steps", f"{total_steps:,}", f"{steps_per_epoch:,} steps per pass over the prompts"),
    ]
    if needs_critic(c) and c.trainer.critic_warmup:
        lines.append(
            ("critic warm-up", f"{c.trainer.critic_warmup} steps", "only the critic learns")
        )
    return lines


def kl_place(c: Config) -> tuple[str, str]:
    """Where KL to the reference acts, and with which coefficient."""
    control = c.algorithm.kl_ctrl.type
    places = []
    if c.algorithm.use_kl_in_reward:
        places.append(
            (
                "in the reward",
                f"{c.algorithm.kl_penalty}, coefficient {c.algorithm.kl_ctrl.kl_coef} ({control})",
            )
        )
    if c.actor.use_kl_loss:
        places.append(
            (
                "in the loss",
                f"{c.actor.kl_loss_type}, coefficient {c.actor.kl_loss_coef} ({control})",
            )
        )
    if not places:
        return "nowhere", "no reference is loaded"
    return " and ".join(place for place, _ in places), "; ".join(detail for _, detail in places)


def models(c: Config) -> list[str]:
    """The networks that this run holds."""
    return [
        "actor",
        *(["critic"] if needs_critic(c) else []),
        *(["reference"] if needs_reference(c) else []),
    ]
