r"""Hostile text is never executed (S1), and nothing in the package could execute it."""

import ast
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards.grader import Sample, make_grader

PACKAGE = Path(jaxrl_llm.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
NAMES = {"eval", "exec", "sympify", "parse_expr"}
LOADERS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "load"), ("os", "system"), ("os", "popen")}  # fmt: skip
ALLOWED: set[tuple[str, str]] = set()
"""(file, what) pairs that were looked at and are harmless."""


def dangers(source):
    """Ways to execute text or unpickle data in a piece of source, as short names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] * ((node.module or "").split(".")[0] in MODULES)
            found += [a.name for a in node.names if a.name in NAMES]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in NAMES:
                found.append(node.func.id)
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if node.func.attr in NAMES - {"eval"} or (owner, node.func.attr) in LOADERS:
                    found.append(f"{owner}.{node.func.attr}")
                if node.func.attr == "eval" and owner in ("builtins", "pd", "ne", "sympy"):
                    found.append(f"{owner}.eval")
            for keyword in node.keywords:
                on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and on:
                    found.append(f"{keyword.arg}=")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "exec(x)", "sympy.sympify(x)", "from sympy import sympify", "parse_expr(x)", "import pickle",
        "from pickle import load", "yaml.load(f)", "torch.load(f)", "np.load(f, allow_pickle=True)",
        "subprocess.run(c, shell=True)", "os.system(c)", "f(trust_remote_code=True)", "f(shell=flag)",
    ],
)  # fmt: skip
def test_the_check_sees(source):
    assert dangers(source)


def test_the_check_passes_harmless_code():
    assert not dangers(
        "np.load(f, allow_pickle=False); yaml.safe_load(f); model.eval(); executor.submit(f)"
    )


def test_nothing_in_the_package_executes_text():
    found = {
        (str(path.relative_to(PACKAGE)), danger)
        for path in sorted(PACKAGE.rglob("*.py"))
        for danger in dangers(path.read_text())
    }
    assert found - ALLOWED == set()


def test_hostile_answers_and_golds_do_nothing(tmp_path, monkeypatch):  # D11, D12, S1
    monkeypatch.chdir(tmp_path)
    attack = f"__import__('os').system('touch {tmp_path / 'canary'}')"
    wrapped = [
        attack,
        rf"\boxed{{{attack}}}",
        rf"\boxed{{{attack} + \pi}}",
        rf"\boxed{{\begin{{pmatrix}} {attack} \end{{pmatrix}}}}",
        rf"\boxed{{[[{attack}]]}}",
        f"#### {attack}",
        f"answer: [[__import__('os').getpid()]] {attack}",
        rf"$\boxed{{\text{{{attack}}}}}$",
        "\\boxed{lambda: ().__class__.__mro__}",
    ]
    pairs = [(text, gold) for text in wrapped for gold in ("1", r"\pi", text, attack)]
    pairs += [(r"\boxed{1}", text) for text in wrapped] + [("#### 1", text) for text in wrapped]
    questions = [f"{attack} = ?", "9**9**9 = ?"]  # D11, D13: the task text is as hostile
    with make_grader(RewardKnobs(functions=("gsm8k", "math"), num_workers=2)) as grader:
        grades = grader.grade(
            [Sample(questions[n % 2], text, gold) for n, (text, gold) in enumerate(pairs)]
        )
    assert [(pair, grade) for pair, grade in zip(pairs, grades, strict=True) if grade.score] == []
    assert list(tmp_path.iterdir()) == []
