"""Agreement of processes: errors that are put together, and what one process alone does without."""

import pytest

from jaxrl_llm import processes
from jaxrl_llm.checkpoint import RunLock, files, run_lock
from jaxrl_llm.checkpoint.together import (
    PeerFailed,
    _joined,
    _spelled,
    all_do,
    all_tell,
    first_does,
    first_line,
    fresh_tag,
)
from jaxrl_llm.errors import ConfigError, DataError


def joined(errors, count=3):
    return _joined({number: _spelled(error) for number, error in errors.items()}, count)


def test_errors_keep_their_class_and_name_their_processes():
    one = joined({1: files.Damaged("leaf w")})
    assert type(one) is files.Damaged and str(one) == "on process 1 of 3: leaf w"
    same = joined({number: files.Damaged("leaf w") for number in range(3)})
    assert str(same) == "leaf w"
    two = joined({0: files.Damaged("leaf w"), 2: files.Damaged("leaf w")})
    assert str(two) == "on process 0, 2 of 3: leaf w"
    many = joined({0: ConfigError(["a", "b"]), 1: ConfigError("b")}, 2)
    assert isinstance(many, ConfigError)
    assert many.problems == ("on process 0 of 2: a", "b")


def test_the_gravest_error_wins():
    mixed = {0: files.Damaged("leaf w"), 1: DataError("another tree"), 2: OSError(28, "no space")}
    worst = joined(mixed)
    assert type(worst) is PeerFailed
    assert str(worst) == "on process 2 of 3: OSError ([Errno 28] no space)"
    del mixed[2]
    assert type(joined(mixed)) is DataError


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(processes, "gather", None)
    assert all_do("a", lambda: object) is object
    assert all_tell("b", lambda: 3) == [3] and first_does("c", lambda: 4) == 4
    with pytest.raises(KeyError):
        all_do("d", lambda: {}["x"])
    assert fresh_tag("x") != fresh_tag("x")


def test_the_first_line_of_an_error_is_short():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "" and len(first_line(ValueError("x" * 900))) == 300


def test_run_lock_holds_the_folder_for_its_block(tmp_path):
    with run_lock(tmp_path / "run"), pytest.raises(ConfigError):
        RunLock(tmp_path / "run")
    with pytest.raises(ConfigError), RunLock(tmp_path / "run"), run_lock(tmp_path / "run"):
        pass
    with pytest.raises(RuntimeError, match="mine"), run_lock(tmp_path / "run"):
        raise RuntimeError("mine")
    RunLock(tmp_path / "run").release()
