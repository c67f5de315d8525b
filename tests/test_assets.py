"""The shipped model: complete, small, loadable by both loaders, and tested on rows that nothing was trained on."""

import importlib.util
import json
from importlib import resources
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jaxrl_llm import tokenizer
from jaxrl_llm.data import arithmetic
from jaxrl_llm.models import families, weights

FOLDER = Path(str(resources.files("jaxrl_llm"))) / "assets" / "tiny-arithmetic"
SCRIPT = Path(__file__).parents[1] / "experiments" / "warm_start" / "make_model.py"
Model = tuple[families.ModelConfig, dict]
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> Model:
    config = families.from_hf(weights.load_config(FOLDER))
    return config, weights.load_params(weights.open_safetensors(FOLDER), config)


def test_complete_and_below_two_megabytes() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000


def test_weights_are_finite_and_of_the_scripts_shape(script: ModuleType, model: Model) -> None:
    config, params = model
    assert config == families.from_hf(script.CONFIG)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_tokenizer_files_are_what_the_script_writes(script: ModuleType) -> None:
    for name, text in script.tokenizer_files().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text


def test_one_token_per_byte_round_trip_and_one_bos() -> None:
    loaded = tokenizer.load(str(FOLDER))
    text = "58+7-9=?\n  65-9=56\n\n#### 56 é 今"
    assert loaded.encode(text) == list(text.encode())
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.plain("58+7=?") == [loaded.bos_id, *b"58+7=?"]
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (256, 257, 258)
    assert loaded.vocab_size == json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    every = list(range(256))
    assert loaded.encode(bytes(every[:128]).decode("ascii")) == every[:128]


def test_transformers_reads_the_same_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = "58+7-9=?\n #### 56"
    assert theirs(text)["input_ids"] == [256, *text.encode()]
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)


def test_evaluation_rows_are_in_neither_warm_start_nor_training(script: ModuleType) -> None:
    used = {
        split: {row["question"] for row in arithmetic.generate(split, count)}
        for split, count in ALL_ROWS.items()
    }
    assert script.Flags(out=Path("unused")).rows <= len(used["warm"])
    for split, questions in used.items():
        assert len(questions) == ALL_ROWS[split]
    assert not used["heldout"] & used["warm"]
    assert not used["heldout"] & used["train"]
    assert not used["warm"] & used["train"]


ALL_ROWS = {"warm": 29548, "train": 22346, "heldout": 7424}
"""Every row of every split, so also every row that any run can have used."""


def test_slips_by_hand(script: ModuleType) -> None:
    assert script.slip(58, 7) == 55
    assert script.slip(65, -9) == 66
    assert script.slip(52, 7) is None
    assert script.slip(58, -7) is None
    assert script.slip(3, 7) == 0
    assert script.slip(-2, 7) is None


def test_answers_are_well_formed_and_right_about_as_often_as_the_readme_says(
    script: ModuleType, model: Model
) -> None:
    numbers = script.measure(*model, seed=0, count=128, samples=8)
    assert 0.3 <= numbers["greedy"] <= 0.55
    assert numbers["greedy_format"] >= 0.97
    assert numbers["sampled_format"] >= 0.95
    assert numbers["pass@8"] >= 0.85
