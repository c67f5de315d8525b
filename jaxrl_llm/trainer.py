"""The host loop: one step after another, each a chain of pure functions, with the happenings around them.

    prompts -> rollout -> rewards -> log-probs, values -> advantages -> updates -> metrics -> validation -> checkpoint

Clocks, files and standard output belong here. The state of the run is one pytree; the loop holds nothing else that a
resume would miss: the data position and the row of a step whose validation was interrupted travel in the manifest.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import (
    assembly,
    diagnostics,
    fault,
    joining,
    metrics,
    networks,
    processes,
    report,
    runtime,
)
from jaxrl_llm.assembly import Parts
from jaxrl_llm.checkpoint import Checkpointer, CheckpointError, check_space
from jaxrl_llm.checks import notices
from jaxrl_llm.config import Config, to_dict
from jaxrl_llm.console import Progress, say
from jaxrl_llm.errors import EXIT_OK, ConfigError, DataError, Interrupted, TrainingStopped
from jaxrl_llm.plots import draw
from jaxrl_llm.processes import Meetings
from jaxrl_llm.records import TrainState
from jaxrl_llm.replicas import ReplicaCheck
from jaxrl_llm.rewards.grader import make_grader
from jaxrl_llm.step import Run, train_step, validate
from jaxrl_llm.watchdog import Watchdog

Row = dict[str, Any]
Say = Callable[[str], None]


def train(config: Config, *, drawn_seed: bool = False) -> int:
    """Run a resolved configuration to its end; returns the exit code 0 or raises a `RunError`.

    With `drawn_seed` the seeds stand in no setting: processes of one run then take those of process 0.
    """
    joining.join(config.distributed, say)
    return processes.end_together(lambda: _train(config, drawn_seed))


def _train(config: Config, drawn_seed: bool) -> int:
    meet = processes.Meetings(config.distributed.wait_timeout)
    with runtime.Signals(meet) as signals:
        config = runtime.start_process(config, meet, drawn_seed=drawn_seed)
        speak = runtime.voice()
        with runtime.run_folder(config) as folder:
            _train_in(config, folder, signals, speak)
            meet.gather("end", None)
    return EXIT_OK


def _train_in(config: Config, folder: Path, signals: runtime.Signals, speak: Say) -> None:
    """Everything that happens while the run folder is held."""
    meet, lead = signals.meet, jax.process_index() == 0
    saver = Checkpointer(
        folder / "checkpoints",
        keep=config.trainer.max_ckpt_to_keep,
        on_damage=config.trainer.on_damaged_checkpoint,
        log=speak,
        beat=meet.pulse.beat,
    )
    config = _continue_config(config, folder, meet, speak)
    for line in notices(config):
        speak(line)
    parts = assembly.build(config, speak)
    runtime.compare_files(meet, parts.config, assembly.same_everywhere(parts))
    state, manifest = _first_or_restored(parts, saver, folder, meet, speak)
    start = int(state.step)
    if start >= parts.total_steps and not manifest.get("pending"):
        speak(
            f"this run is finished: step {start} of {parts.total_steps} is saved in {folder}. To go on: a larger "
            "trainer.total_training_steps (or total_epochs), another trainer.run_dir, or resume_mode=disable there"
        )
        return
    if lead:
        runtime.write_config(folder, parts.config)
        metrics.truncate(folder, start - 1 if manifest.get("pending") else start if start else -1)
    with (
        make_grader(config.reward) as grader,
        metrics.open_sinks(
            folder,
            config.trainer.logger,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name or "",
            config=to_dict(config),
            log=speak,
            process_index=jax.process_index(),
        ) as log,
        Progress(parts.total_steps, start, process=jax.process_index()) as progress,
    ):
        runtime.compare_processes(meet, grader.digests)
        grader.prestart()
        compilations = metrics.CompileCounter()

        @contextmanager
        def around(name: str) -> Iterator[None]:
            with compilations.phase(name), meet.pulse.within(name):
                yield

        run = Run(
            folder=folder,
            signals=signals,
            grader=grader,
            keys=itertools.count(),
            log=log,
            progress=progress,
            saver=saver,
            phases=metrics.Phases(around=around),
            compilations=compilations,
            history=[row for row in metrics.read_rows(folder) if row["step"] > 0] if lead else [],
        )
        for name, old in manifest.get("rewards", {}).items():
            if old != grader.digests.get(name):
                speak(f"reward function {name}: its file has changed since step {start}")
        with Watchdog(meet.pulse, config.distributed.watchdog_seconds) as watchdog:
            _loop(parts, run, state, manifest, watchdog)
    fault.point("at_exit", parts.total_steps)
    if lead:
        _finish(folder)


# Start and resume ----------------------------------------------------------------------------------------------------


def _continue_config(config: Config, folder: Path, meet: Meetings, speak: Say) -> Config:
    """Hold the settings against those the folder was made with; a folder of another run is refused."""
    saved = runtime.saved_config(folder, meet)
    if saved is None:
        return config
    if config.trainer.resume_mode == "disable":
        raise ConfigError(
            f"trainer.resume_mode = disable, but {folder} holds a run; choose another trainer.run_dir or move the folder away"
        )
    config = runtime.adopt(saved, config)
    runtime.compare(saved, config, speak)
    return config


def _first_or_restored(
    parts: Parts, saver: Checkpointer, folder: Path, meet: Meetings, speak: Say
) -> tuple[TrainState, Row]:
    """The newest verified checkpoint, or the state before the first step.

    A path leads elsewhere only until this folder has a checkpoint of its own, so that the same command continues; a path
    into this folder goes back to that step.
    """
    knobs = parts.config.trainer
    restored = None
    source = Path(knobs.resume_from_path or "").expanduser().absolute()
    begun = meet.first("begun", lambda: bool(saver.steps()) and source.parent != saver.directory)
    if knobs.resume_mode == "auto" or (knobs.resume_mode == "path" and begun):
        restored = saver.restore(networks.abstract_state(parts))
    elif knobs.resume_mode == "path":
        if not source.name.isdecimal() or not source.is_dir():
            raise ConfigError(
                f"trainer.resume_from_path: got {source}, need the folder of a checkpoint step (…/checkpoints/00000020)"
            )
        elsewhere = Checkpointer(source.parent, keep=None, on_damage="stop", log=speak)
        restored = elsewhere.restore(networks.abstract_state(parts), step=int(source.name))
        if restored is None:
            raise DataError(
                f"trainer.resume_from_path: {source} holds no checkpoint; need a step folder with a manifest"
            )
    if restored is None:
        state = networks.first_state(parts)
        bytes_needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if problem := check_space(folder / "checkpoints", bytes_needed, knobs.max_ckpt_to_keep):
            raise ConfigError(problem)
        speak("starting at step 0: no checkpoint in the run folder yet")
        return state, {}
    step, state, manifest = restored
    wrong = [
        f"{name}: the run was trained on {old}, now there is {parts.fingerprint.get(name)}; restore the old data or start another run"
        for name, old in manifest["fingerprint"].items()
        if old != parts.fingerprint.get(name) and not _of_another_type(name, old, parts)
    ]
    if wrong:
        raise ConfigError(wrong)
    if _of_another_type("reference", manifest["fingerprint"].get("reference", ""), parts):
        speak(
            "warning: the reference had another type when this run was saved; whether it is the same one is not checked"
        )
    parts.stream.restore(manifest["stream"])
    speak(f"resuming after step {step}")
    return state, manifest


def _of_another_type(name: str, old: str, parts: Parts) -> bool:
    """Whether a digest is of the reference in another type (`float32:…`), which says nothing about this one."""
    new = parts.fingerprint.get(name, "")
    return name == "reference" and bool(old and new) and old.split(":")[0] != new.split(":")[0]


# The loop --------------------------------------------------------------------------------------------------------------


def _loop(parts: Parts, run: Run, state: TrainState, manifest: Row, watchdog: Watchdog) -> None:
    knobs = parts.config.trainer
    stream, pending = parts.stream.state(), None
    saved_step = int(state.step) if manifest else None
    replicas = ReplicaCheck(parts, run.meet, knobs.check_replicas_freq)
    blocked = 0.0
    profiled = knobs.profile_steps if jax.process_index() == 0 else ()
    traced = metrics.Profiler(run.folder / "profile", profiled, run.progress.say)
    never = [step for step in profiled if not 0 < step <= parts.total_steps]
    if never:
        say(f"trainer.profile_steps: {never} are no steps of this run (1 to {parts.total_steps})")

    def save(pending: Row | None = None) -> None:
        replicas.check(state, stream)
        open_step = pending and {"row": pending, "samples": run.samples}
        run.saver.save(
            int(state.step),
            state,
            {
                "stream": stream,
                "fingerprint": parts.fingerprint,
                "rewards": run.grader.digests,
                "pending": run.meet.first("pending", lambda: open_step) if pending else None,
            },
        )

    try:
        replicas.check(state, stream)
        if manifest.get("pending"):
            pending, run.samples = manifest["pending"]["row"], manifest["pending"]["samples"]
            _close_step(parts, run, state, int(state.step), pending)
            pending = None
            if int(state.step) == parts.total_steps:
                save()
        elif int(state.step) == 0 and knobs.val_before_train and parts.val:
            with run.phases("testing"):
                row = validate(parts, run, state, 0)
            run.log.write(0, row | run.phases.row())
            run.progress.say(_accuracy(row, 0))
        for step in range(int(state.step) + 1, parts.total_steps + 1):
            with traced(step):
                state, row = train_step(parts, run, state, step)
            row["timing_s/save_checkpoint"] = run.saver.blocked_seconds - blocked
            blocked = run.saver.blocked_seconds
            stream, pending = parts.stream.state(), row
            _close_step(parts, run, state, step, row)
            pending = None
            watchdog.finished()
            fault.point("after_update", step)
            if _failed(run, run.saver.check):
                saved_step = None
            if replicas.due(step):
                replicas.check(state, stream)
            if _due(knobs.save_freq, step) or step == parts.total_steps:
                save()
                saved_step = step
        run.saver.wait()
    except runtime.StopRequested:
        if _failed(run, run.saver.wait):
            saved_step = None
        reached = int(state.step)
        if reached and (saved_step != reached or pending):
            save(pending)
        run.saver.wait()
        kept = f"step {reached} of {parts.total_steps} is saved" if reached else "no step is done"
        raise Interrupted(f"stopped by a signal; {kept}, the same command continues") from None
    except Exception as problem:
        for text in run.saver.settle():
            run.progress.say(text)
        processes.tell(problem)
        raise


def _close_step(parts: Parts, run: Run, state: TrainState, step: int, row: Row) -> None:
    """Keep samples, validate where it is due, write the row, raise alarms; stops the run after too many bad steps."""
    knobs = parts.config.trainer
    shown = run.samples[: knobs.log_completions_count]
    if shown and _due(knobs.log_completions_freq, step):
        run.log.completions(step, shown)
        if "console" in knobs.logger:
            run.progress.say(report.table(shown, step))
    last = step == parts.total_steps
    if parts.val and (_due(knobs.test_freq, step) or last):
        with run.phases("testing"):
            row = row | validate(parts, run, state, step)
        row |= {"timing_s/testing": run.phases.row()["timing_s/testing"]}
        run.progress.say(_accuracy(row, step))
    run.log.write(step, row)
    if "console" in knobs.logger:
        run.progress.step(step, row)
    for line in run.compilations.news(step):
        run.progress.say(line)
    control = parts.config.algorithm.kl_ctrl
    target = control.target_kl if control.type == "adaptive" else None
    texts = [sample["response"] for sample in run.samples]
    if jax.process_index() == 0:
        for alarm in diagnostics.news(row, run.history, target_kl=target, examples=texts):
            run.progress.say(str(alarm))
        run.history.append(row)
    if int(state.counters.bad_in_a_row) >= knobs.max_bad_steps:
        raise TrainingStopped(
            f"{int(state.counters.bad_in_a_row)} bad steps in a row (non-finite loss, gradient, logits, or no valid reward), the "
            f"limit is trainer.max_bad_steps = {knobs.max_bad_steps}; lower actor.optim.lr, look at {run.folder}/metrics.jsonl, "
            "and start again from the last checkpoint"
        )


def _due(freq: int | None, step: int) -> bool:
    return freq is not None and step % freq == 0


def _accuracy(row: Row, step: int) -> str:
    """One line of held-out accuracies."""
    parts = [
        f"{key.removeprefix('val/')} {value:.3f}"
        for key, value in row.items()
        if key.startswith("val/") and "/acc/" in key
    ]
    return f"held-out at step {step}: " + ", ".join(parts)


def _failed(run: Run, ask: Callable[[], None]) -> bool:
    """Whether a background save has failed; it is said at once, and the older checkpoints stay."""
    try:
        ask()
    except CheckpointError as problem:
        run.progress.say(problem.report())
        return True
    return False


def _finish(folder: Path) -> None:
    """Draw the plots and say where everything is."""
    picture = None
    try:
        picture = draw(folder)
    except Exception as problem:
        say(f"warning: no plots ({type(problem).__name__}: {problem}); metrics.jsonl is complete")
    say(f"plots:    {picture}" if picture else "plots:    none")
    say(f"samples:  {folder / 'completions'}")
    say(f"metrics:  {folder / 'metrics.jsonl'}")
    say(
        f"weights:  {folder / 'checkpoints'}  (python -m jaxrl_llm export --run_dir={folder} writes a Hugging Face folder)"
    )


# Other uses of a run's parts -------------------------------------------------------------------------------------------


def evaluate(config: Config, *, drawn_seed: bool = False) -> int:
    """Print held-out metrics of the newest checkpoint of the run folder, or of the first weights; writes nothing there."""
    if not config.data.val_files:
        raise ConfigError("data.val_files: got an empty list, need held-out prompts to evaluate on")
    joining.join(config.distributed, say)
    return processes.end_together(lambda: _evaluate(config, drawn_seed))


def _evaluate(config: Config, drawn_seed: bool) -> int:
    meet = processes.Meetings(config.distributed.wait_timeout)
    config = runtime.start_process(config, meet, drawn_seed=drawn_seed)
    speak = runtime.voice()
    folder = Path(config.trainer.run_dir or "")
    parts = assembly.build(config, speak)
    runtime.compare_files(meet, parts.config, assembly.same_everywhere(parts))
    saver = Checkpointer(folder / "checkpoints", keep=None, log=speak)
    there = meet.first("folder", folder.is_dir)
    restored = saver.restore(networks.abstract_state(parts)) if there else None
    state = restored[1] if restored else networks.first_state(parts)
    with (
        runtime.Signals(meet) as signals,
        make_grader(config.reward) as grader,
        Progress(1, process=jax.process_index()) as progress,
    ):
        run = Run(
            folder=folder,
            signals=signals,
            grader=grader,
            keys=itertools.count(),
            log=metrics.MetricsLog(None),
            progress=progress,
            saver=saver,
            phases=metrics.Phases(),
            compilations=metrics.CompileCounter(),
            history=[],
        )
        try:
            row = validate(parts, run, state, int(state.step))
        except runtime.StopRequested:
            raise Interrupted("stopped by a signal; nothing was written") from None
    speak(f"weights of step {int(state.step)} ({'checkpoint' if restored else config.model.path})")
    for name, value in row.items():
        speak(f"{name} {value:.4f}")
    return EXIT_OK


def export(folder: Path, target: Path, dtype: str) -> None:
    """Write the newest verified policy of a run as a Hugging Face folder; the target is complete or absent."""
    from jaxrl_llm.models import weights

    config = runtime.read_config(folder)
    if config is None:
        raise DataError(f"{folder} holds no config.json; need the folder of a run")
    trained = networks.build_networks(config)
    saver = Checkpointer(folder / "checkpoints", keep=None, log=say)
    restored = saver.restore(networks.abstract_state(trained))
    if restored is None:
        raise DataError(
            f"{folder} holds no checkpoint yet; set trainer.save_freq or let the run end"
        )
    step, state, _ = restored
    fault.point("in_export", step)
    files = trained.tokenizer.files()
    weights.save_hf(
        target, trained.actor.network.config, state.actor.trainable, dtype=dtype, extra_files=files
    )
    say(f"step {step} -> {target}")
