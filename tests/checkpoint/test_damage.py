"""Restores against flipped bits, cut files and other trees: detected, named, never trained on."""

import gc
import random
import re
import shutil
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import (
    files,
    reading,
)
from jaxrl_llm.checkpoint.digest import array_digest
from jaxrl_llm.errors import DataError
from tests.checkpoint.rig import (
    abstract,
    bits,
    orbax_noise,
    save_all,
    saver_for,
    small,
    train_state,
)


def data_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    blob = bytearray(path.read_bytes())
    blob[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(blob)


@orbax_noise
def test_a_flipped_bit_in_any_file_is_detected_or_harmless(tmp_path):
    checkpointer, log = saver_for(tmp_path)
    states = {step: train_state(step) for step in (1, 2)}
    for step, state in states.items():
        checkpointer.save(step, state, {"step": step})
    checkpointer.wait()
    draw = random.Random(0)
    fell_back: dict[str, str] = {}
    for path in data_files(tmp_path / "00000002"):
        whole = path.read_bytes()
        for bit in draw.sample(range(8 * len(whole)), 4):
            flip(path, bit)
            log.clear()
            step, back, run = checkpointer.restore(abstract(states[1]))
            assert bits(back) == bits(states[step]) and run == {"step": step}
            if step == 1:
                fell_back.setdefault(path.name, log[-1])
                assert "step 2" in log[-1]
            path.write_bytes(whole)
    assert "manifest.json" in fell_back and len(fell_back) >= 3


def test_flipped_data_names_step_and_leaf(tmp_path, monkeypatch):
    """Orbax hands over other numbers without complaint: the digests alone must catch it."""
    checkpointer, log = saver_for(tmp_path)
    save_all(checkpointer, [1, 2])
    honest = reading.open_tree

    @contextmanager
    def lying(path):
        def read(name, entry):
            array = tell(name, entry)
            if path.parent.name == "00000002" and name == "w":
                array = array.copy()
                array.view(np.uint32)[3, 5] ^= 1 << 20
            return array

        with honest(path) as tell:
            yield read

    monkeypatch.setattr(reading, "open_tree", lying)
    assert checkpointer.restore(abstract(small(1)))[0] == 1
    assert "step 2" in log[-1] and "another digest than was saved: w" in log[-1]
    strict, _ = saver_for(tmp_path, on_damage="stop")
    with pytest.raises(DataError, match="step 2") as caught:
        strict.restore(abstract(small(1)))
    assert caught.value.exit_code == 65


@orbax_noise
def test_a_step_given_up_half_way_leaves_nothing_on_the_devices(tmp_path, monkeypatch):
    checkpointer, _ = saver_for(tmp_path)
    save_all(checkpointer, [1, 2])

    def digest(array):
        return "other" if array.size > 1 and array[0, 0] == 2 else array_digest(array)

    monkeypatch.setattr(reading, "array_digest", digest)
    wanted = abstract(small(1))
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        step, back, _ = checkpointer.restore(wanted)
        held = len(jax.live_arrays())
    finally:
        gc.enable()
    assert step == 1 and held == before + len(jax.tree.leaves(back))


@pytest.mark.parametrize("harm", ["half", "empty", "deleted"])
def test_cut_empty_and_deleted_files(tmp_path, harm):
    checkpointer, log = saver_for(tmp_path)
    save_all(checkpointer, [1, 2])
    for path in data_files(tmp_path / "00000002"):
        whole = path.read_bytes()
        if harm == "deleted":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 2] if harm == "half" else b"")
        log.clear()
        step, back, _ = checkpointer.restore(abstract(small(1)))
        assert step == 1 and bits(back) == bits(small(1))
        assert path.name in log[-1] and "step 2" in log[-1]
        with pytest.raises(DataError):
            checkpointer.restore(abstract(small(1)), step=2)
        path.write_bytes(whole)
    assert checkpointer.restore(abstract(small(1)))[0] == 2


def test_every_step_damaged_is_an_error_not_a_fresh_start(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    save_all(checkpointer, [1, 2])
    (tmp_path / "00000001" / "manifest.json").unlink()
    (tmp_path / "00000002" / "manifest.json").write_text("{")
    assert checkpointer.steps() == [2]
    with pytest.raises(DataError) as caught:
        checkpointer.restore(abstract(small(1)))
    assert len(caught.value.problems) == 2
    (tmp_path / "00000002").rename(tmp_path / "00000003")
    with pytest.raises(DataError):
        checkpointer.restore(abstract(small(1)))


def test_a_step_under_another_number_is_damage(tmp_path):
    checkpointer, log = saver_for(tmp_path)
    save_all(checkpointer, [1])
    shutil.copytree(tmp_path / "00000001", tmp_path / "00000009")
    assert checkpointer.restore(abstract(small(1)))[0] == 1
    assert "00000009" in log[0]


def test_after_falling_back_the_damaged_step_is_saved_anew_and_nothing_is_lost(tmp_path):
    checkpointer, _ = saver_for(tmp_path, keep=2)
    save_all(checkpointer, [10, 20])
    (tmp_path / "00000020" / "manifest.json").write_text("")
    again, _ = saver_for(tmp_path, keep=1)
    assert again.restore(abstract(small(1)))[0] == 10
    save_all(again, [20])
    assert again.steps() == [20]
    assert again.restore(abstract(small(1)))[0] == 20
    assert (tmp_path / "00000020.aside-1").exists()


def test_another_tree_shape_or_dtype_is_refused(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    state = train_state(1)
    checkpointer.save(1, state, {})
    checkpointer.wait()
    half = jax.tree.map(
        lambda leaf: (
            leaf if leaf.dtype != jnp.float32 else jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
        ),
        abstract(state),
    )
    wanted = {
        "saved float32[32,16], wanted bfloat16[32,16]": half,
        "saved float32[32,16], wanted float32[32,24]": abstract(train_state(1, width=24)),
        "+ critic/frozen/base": abstract(state.replace(critic=state.actor)),
        "- actor/opt_state/1/0/count": abstract(
            state.replace(actor=state.actor.replace(opt_state=()))
        ),
    }
    for text, tree in wanted.items():
        with pytest.raises(DataError, match=re.escape(text)) as caught:
            checkpointer.restore(tree)
        assert len(str(caught.value).splitlines()) <= 21


def test_asking_for_a_step(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    save_all(checkpointer, [1, 2])
    assert checkpointer.restore(abstract(small(1)), step=1)[0] == 1
    with pytest.raises(DataError, match=r"committed here: 1, 2"):
        checkpointer.restore(abstract(small(1)), step=3)
    with pytest.raises(DataError):
        checkpointer.manifest(3)


def test_a_format_of_the_future_is_refused(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    save_all(checkpointer, [1])
    folder = tmp_path / "00000001"
    files.write_manifest(folder, {**files.read_manifest(folder), "format": 3})
    with pytest.raises(DataError, match="format 3, need 1 or 2"):
        checkpointer.restore(abstract(small(1)))
