"""Every setting: documented, frozen, of a type the parser knows, and marked as it should be."""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path

import pytest

import jaxrl_llm.knobs
from jaxrl_llm import knobs
from jaxrl_llm.config import Config, leaves
from jaxrl_llm.knobs.marks import is_operational, operational
from jaxrl_llm.values import describe_type, parse, type_problem

FOLDER = Path(jaxrl_llm.knobs.__file__).parent
CLASSES = [getattr(knobs, name) for name in knobs.__all__]


def settings() -> list[tuple[type, dataclasses.Field, object]]:
    return [
        (kind, declared, typing.get_type_hints(kind)[declared.name])
        for kind in CLASSES
        for declared in dataclasses.fields(kind)
    ]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_every_field_has_a_docstring_right_after_it(file):
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        assert ast.get_docstring(node), node.name
        for position, statement in enumerate(node.body):
            if isinstance(statement, ast.AnnAssign):
                after = node.body[position + 1] if position + 1 < len(node.body) else None
                name = f"{node.name}.{ast.unparse(statement.target)}"
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), name
                assert isinstance(after.value.value, str) and len(after.value.value.strip()) > 10, (
                    name
                )
                assert after.value.value.strip()[-1] in ".`)", name


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_frozen_with_defaults(kind):
    held = kind()
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(held, name, 1)
    assert hash(held) == hash(kind())
    assert inspect.getmodule(kind).__name__.startswith("jaxrl_llm.knobs.")  # type: ignore[union-attr]


def test_no_other_public_class_hides_in_the_folder():
    declared = {
        node.name
        for file in FOLDER.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert declared == set(knobs.__all__)


def test_every_type_is_one_the_parser_knows_and_every_default_is_of_it():
    for kind, declared, hint in settings():
        if dataclasses.is_dataclass(hint):
            continue
        name = f"{kind.__name__}.{declared.name}"
        default = getattr(kind(), declared.name)
        assert type_problem(hint, default) is None, name
        assert describe_type(hint), name
        try:
            parse(hint, "\0")
        except ValueError:
            pass
        except TypeError as problem:
            pytest.fail(f"{name}: {problem}")


def test_no_section_is_optional():
    for kind, declared, hint in settings():
        nested = [arg for arg in typing.get_args(hint) if dataclasses.is_dataclass(arg)]
        assert nested == [], f"{kind.__name__}.{declared.name}"


def test_no_default_means_ask_someone_else():
    assert [path for path, _, value in leaves(Config()) if value == -1] == []


OPERATIONAL = {
    "trainer.save_freq", "trainer.test_freq", "trainer.logger", "trainer.total_epochs", "trainer.total_training_steps",
    "trainer.project_name", "trainer.experiment_name", "trainer.run_dir", "trainer.resume_mode",
    "trainer.resume_from_path", "actor.optim.lr", "critic.optim.lr", "trainer.max_ckpt_to_keep",
    "trainer.log_completions_freq", "trainer.compilation_cache_dir", "reward.num_workers", "data.num_workers",
}  # fmt: skip
IDENTITY_SECTIONS = ("model.", "data.", "algorithm.", "rollout.", "actor.", "critic.", "reward.")


def test_the_marks():
    marked = {path for path, declared, _ in leaves(Config()) if is_operational(declared)}
    assert marked >= OPERATIONAL
    shaping = {path for path in marked if path.startswith(IDENTITY_SECTIONS)}
    assert shaping == {
        "actor.optim.lr",
        "actor.param_offload",
        "actor.optimizer_offload",
        "critic.optim.lr",
        "critic.param_offload",
        "critic.optimizer_offload",
        "reward.num_workers",
        "data.num_workers",
    }
    assert {
        "trainer.seed",
        "data.seed",
        "trainer.critic_warmup",
        "rollout.n",
        "data.train_batch_size",
    }.isdisjoint(marked)


def test_a_mark_keeps_the_default():
    @dataclasses.dataclass(frozen=True)
    class Two:
        a: int = operational(3)
        b: int = 4

    assert (Two().a, Two().b) == (3, 4)
    assert [is_operational(declared) for declared in dataclasses.fields(Two)] == [True, False]
