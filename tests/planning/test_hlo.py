"""Bytes that devices send, read from program text: by hand, and from programs compiled for eight fake devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.planning import hlo

TEXT = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%small (p: (f32[8])) -> f32[8] {
  %p = (f32[8]{0}) parameter(0)
  ROOT %g = f32[8]{0} get-tuple-element(%p), index=0
}

%large (p.1: (f32[8])) -> f32[8] {
  %p.1 = (f32[8]{0}) parameter(0)
  %g.1 = f32[8]{0} get-tuple-element(%p.1), index=0
  ROOT %all-reduce.9 = f32[8]{0} all-reduce(%g.1), channel_id=9, replica_groups={{0,1},{2,3}}, to_apply=%add
}

%window_cond (c: (u32[], bf16[4,8])) -> pred[] {
  %limit = u32[]{:T(128)} constant(6)
  %c = (u32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%window_body (d: (u32[], bf16[4,8])) -> (u32[], bf16[4,8]) {
  %d = (u32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%d), index=0
  %x = bf16[4,8]{1,0:T(8,128)} get-tuple-element(%d), index=1
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%j, %two)
  %cps = (bf16[4,8]{1,0:T(8,128)}, bf16[4,8]{1,0:T(8,128)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %cpd = bf16[4,8]{1,0:T(8,128)} collective-permute-done(%cps)
  ROOT %out = (u32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)}) tuple(%next, %cpd)
}

%open_cond (e: (s32[], s32[])) -> pred[] {
  %e = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%e), index=0
  %n = s32[] get-tuple-element(%e), index=1
  ROOT %l = pred[] compare(%k, %n), direction=LT
}

%open_body (f: (s32[], s32[])) -> (s32[], s32[]) {
  %f = (s32[], s32[]) parameter(0)
  %ag = (f32[16]{0}, f32[64]{0}) all-gather-start(%w), channel_id=4, replica_groups=mesh['a'=2,'b'=2] {'a','b'}, dimensions={0}
  %rs = f32[16]{0} reduce-scatter(%v), channel_id=5, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, to_apply=%add
  %which = f32[8]{0} conditional(%pick, %t, %t), true_computation=%large, false_computation=%small
  ROOT %o = (s32[], s32[]) tuple(%k1, %n1)
}

ENTRY %main (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  %wa = (u32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)}) while(%init), condition=%window_cond, body=%window_body
  %wb = (s32[], s32[]) while(%init2), condition=%open_cond, body=%open_body
  ROOT %r = f32[8]{0} copy(%z)
}
"""


def test_loops_branches_and_groups_are_counted_by_hand():
    """The window runs 3 times (0, 2, 4 below 6) and sends 64 bytes; the open loop as planned: a gather of 256 bytes among four
    sends 3/4 of them, a scatter of 2 x 64 bytes among two half, the larger branch's sum of 32 bytes twice a half."""
    found = hlo.traffic(TEXT, planned=7, per_node=4, devices=4)
    assert found.sent == {
        "collective-permute": 3 * 64,
        "all-gather": 7 * 256 * 3 / 4,
        "reduce-scatter": 7 * 128 / 2,
        "all-reduce": 7 * 2 * 32 / 2,
    }
    assert found.abroad == 0


def test_bytes_that_leave_a_node_are_shared_by_its_devices():
    """Nodes of two: the gather's other half, 128 bytes, comes over two devices' networks; the scatter's groups 0,2 and 1,3 cross
    with half of 128 bytes and one device each; half of the permutes cross; the sum among 0,1 does not."""
    found = hlo.traffic(TEXT, planned=1, per_node=2, devices=4)
    assert found.abroad == 3 * 64 * 2 / 4 + 256 / 2 / 2 + 128 / 2


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("replica_groups=[4,2]<=[8]", [0, 1]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", [0, 4]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}", [0, 1, 2, 3]),
        ("replica_groups={}", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_groups_of_devices(line, group):
    assert hlo._group(line, 8) == group


def test_a_compiled_scan_sends_its_sums_as_often_as_it_runs():
    mesh = sharding.make_mesh(MeshShape(8, 1, 1), jax.devices()[:8])
    split = NamedSharding(mesh, PartitionSpec(None, "data"))

    def five(x):
        def step(total, _):
            summed = jnp.sum(jnp.sin(x * total.sum()), axis=1)
            return summed, None

        return jax.lax.scan(step, jnp.ones((4,)), None, length=5)[0]

    argument = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=split)
    text = jax.jit(five).lower(argument).compile().as_text()
    found = hlo.traffic(text, planned=1, per_node=8, devices=8)
    assert found.sent == {"all-reduce": 5 * 2 * 16 * 7 / 8}
