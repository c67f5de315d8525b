"""Packed rows of the four uses of a batch: policy update, critic update, old log-probs, reference log-probs.

Left out on purpose: layouts that depend on a batch.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import packing, scoring, sharding
from jaxrl_llm.config import Config, needs_critic, needs_reference
from jaxrl_llm.learner import Plan
from jaxrl_llm.networks import critic_plan, plan_of
from jaxrl_llm.packing import Layout, Packed, make_layout
from jaxrl_llm.records import Rollout
from jaxrl_llm.rollout.sampling import SHUFFLE

Sizes = tuple[int | None, int | None]
"""Trajectories at once, or tokens at once: one of them is `None`."""


@dataclass(frozen=True)
class Layouts:
    """The layout of each use; equal ones are packed once. `critic` and `reference` are the policy's where there is none."""

    actor: Layout
    critic: Layout
    score: Layout
    reference: Layout


def sizes(rows: int | None, dynamic: bool | None, tokens: int | None) -> Sizes:
    """What bounds a device: `tokens` with `dynamic`, else `rows`; the other setting does not count."""
    return (None, tokens) if dynamic else (rows, None)


def layouts_of(config: Config, mesh: Mesh, attention: str) -> Layouts:
    """Layouts from settings, mesh and kind of attention. Scoring shares the policy's rows unless other sizes hold for it: then its
    rows are filled from the whole batch."""
    a, c, o, r = config.actor, config.critic, config.rollout, config.ref
    trained = sizes(
        a.ppo_micro_batch_size_per_device, a.use_dynamic_bsz, a.ppo_max_token_len_per_device
    )
    valued = sizes(
        c.ppo_micro_batch_size_per_device, c.use_dynamic_bsz, c.ppo_max_token_len_per_device
    )
    make = partial(
        make_layout,
        prompts=config.data.train_batch_size,
        group=config.rollout.n,
        prompt_width=config.data.max_prompt_length,
        response_width=config.data.max_response_length,
        shards=sharding.shards(mesh),
        share=config.model.use_prefix_sharing,
        pad=not config.model.use_remove_padding,
        attention=attention,
        platform=sharding.platform(mesh),
        context=mesh.shape["context"],
    )

    def sized(plan: Plan, bounds: Sizes) -> Layout:
        return make(
            mini_prompts=plan.mini_prompts,
            passes=plan.passes,
            shuffle=plan.shuffle,
            micro_rows=bounds[0],
            budget=bounds[1],
        )

    plan = plan_of(config)
    policy = sized(plan, trained)
    whole = replace(plan, mini_prompts=plan.prompts, shuffle=False)

    def scored(rows: int | None, dynamic: bool | None, tokens: int | None) -> Layout:
        bounds = sizes(rows, dynamic, tokens)
        return policy if bounds == trained else sized(whole, bounds)

    return Layouts(
        actor=policy,
        critic=sized(critic_plan(config), valued) if needs_critic(config) else policy,
        score=scored(
            o.log_prob_micro_batch_size_per_device,
            o.log_prob_use_dynamic_bsz,
            o.log_prob_max_token_len_per_device,
        ),
        reference=scored(
            r.log_prob_micro_batch_size_per_device,
            r.log_prob_use_dynamic_bsz,
            r.log_prob_max_token_len_per_device,
        )
        if needs_reference(config)
        else policy,
    )


def pack_all(
    layouts: Layouts, rollout: Rollout, mesh: Mesh, *, seed: int, step: int
) -> tuple[dict[Layout, Packed], dict[str, float]]:
    """The batch in every layout that is used, on the devices, and the metrics of the policy's packing.

    With `actor.shuffle` the mini-batches of each pass come from `seed`, `step` and nothing else.
    """
    packs, row = {}, {}
    for layout in dict.fromkeys((layouts.actor, layouts.critic, layouts.score, layouts.reference)):
        random = np.random.default_rng([seed, step, SHUFFLE])
        drawn = [random.permutation(layout.prompts) for _ in range(layout.passes)]
        host, packed_as = packing.pack(layout, rollout, drawn if layout.shuffle else None)
        packs[layout] = scoring.place(host, mesh)
        if layout == layouts.actor:
            row = packed_as.row()
    return packs, row
