"""Against transformers and PyTorch in the same process; the marker keeps these out of the default run."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.models import families, weights
from tests.golden.models import tiny
from tests.models.test_parity_golden import TOLERANCE, all_logits, load

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("case", tiny.CASES)
def test_the_golden_files_are_what_transformers_computes(case):
    from tests.golden.models.make_golden import reference_logits

    np.testing.assert_allclose(reference_logits(case), tiny.golden(case), atol=1e-5)


def loaded_logits(folder, tokens):
    """Logits of a folder as transformers loads it, and the loading report's missing and unexpected names."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    return logits, set(report["missing_keys"]) | set(report["unexpected_keys"])


@pytest.mark.parametrize("case", tiny.CASES)
def test_folders_load_alike_on_both_sides(case, tmp_path):
    config, params = load(tmp_path / "made", case)
    logits, odd = loaded_logits(tmp_path / "made", tiny.tokens(case))
    assert not odd
    ours = np.asarray(all_logits(config, params, tiny.tokens(case)))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE)


@pytest.mark.parametrize("case", tiny.CASES)
@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_saved_folders_load_in_transformers(case, limit, tmp_path):
    config, params = load(tmp_path / "made", case)
    weights.save_hf(tmp_path / "saved", config, params, max_shard_bytes=limit)
    logits, odd = loaded_logits(tmp_path / "saved", tiny.tokens(case))
    assert not odd
    np.testing.assert_allclose(logits, tiny.golden(case), atol=TOLERANCE)


@pytest.mark.parametrize("case", tiny.CASES)
def test_what_transformers_saves_loads_here(case, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = AutoConfig.for_model(**tiny.CASES[case])
    AutoModelForCausalLM.from_config(fields).save_pretrained(tmp_path)
    config = families.from_hf(weights.load_config(tmp_path))
    expected = families.from_hf(tiny.CASES[case])
    assert config == replace(expected, bos_id=config.bos_id, eos_ids=config.eos_ids)
    params = weights.load_params(weights.open_safetensors(tmp_path), config)
    tokens = tiny.tokens(case)
    logits, odd = loaded_logits(tmp_path, tokens)
    assert not odd
    np.testing.assert_allclose(all_logits(config, params, tokens), logits, atol=TOLERANCE)
