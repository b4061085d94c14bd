"""The runs of lab/run_all.sh: which there are, what each needs, and how its result becomes a line of benches/results."""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import threading
import time

sys.path.insert(0, "scripts/measure")
from lines import rounded  # noqa: E402
from machine import git, physical_cores, processor, program  # noqa: E402

RESULTS = "benches/results/runs.jsonl"
RUNS = os.environ.get("RUNS", "target/runs")
# One thread each: two runs share two cores.
ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "CANDLE_NUM_THREADS": "1", "CANDLE_BARRIER_POOL_SPIN_LIMIT": "100"}
MEASURED = ["src", "codes", "lab/src", "lab/run_all.py", "Cargo.toml", "Cargo.lock"]

HEADS = ["softmax", "moc", "mos"]
SEEDS = [1, 2]

# Penn Treebank, preset `small` with half of its dropouts: the learning rate.
PTB_TRIALS = ["--lr 10", "--lr 20", "--lr 30", "--lr 40"]
PTB_RECIPE = "--preset small --decay 1 --average 8"
PTB_RECIPE += " --dropout 0.05 --output-dropout 0.1 --weight-dropout 0.05 --embedding-dropout 0.025"
PTB_EPOCHS = 4
# Every system has about 5 million parameters. The codes' LSTM is wider, as they have fewer rows.
SYSTEMS = {
    "softmax": "--head softmax",
    "moc": "--head moc",
    "mos": "--head mos",
    "sampled": "--head mos --output sampled --samples 1000",
    "adaptive": "--head mos --output adaptive --tied false --embedding 160",
    "codes": "--head mos --output hybrid-light-rnn --inner 580 --hidden 430 --embedding 300",
}
# The others have the learning rate of the mixture's best trial.
TRIED = [*HEADS, "sampled"]
# Minutes of equal time; each system has these on one core, at the seconds of a step on a quiet machine.
MINUTES = 40

# Multi30k: Adam's learning rate and the dropout, with linear contexts.
MULTI30K_TRIALS = ["--lr 0.002 --dropout 0.16", "--lr 0.0037 --dropout 0.16", "--lr 0.002 --dropout 0.3", "--lr 0.0037 --dropout 0.3"]


class Run:
    """One training: the flags of a program, or how they follow from the results that it needs."""

    def __init__(self, name, figure, shape, program, data, flags, needs=(), files=(), **key):
        """`files`: names of files of an earlier run that the flags name, as {RUNS}/NAME."""
        self.name, self.figure, self.shape, self.program, self.data = name, figure, shape, program, data
        self.flags, self.needs, self.files, self.key = flags, list(needs), list(files), key

    def path(self, ending):
        return os.path.join(RUNS, f"{self.name}{ending}")

    def is_line(self, line):
        return line["figure"] == self.figure and all(line.get(key) == value for key, value in self.key.items())

    def result(self, results):
        return next((line for line in results if self.is_line(line)), None)

    def resolved(self, results):
        return self.flags(results) if callable(self.flags) else self.flags


def best(trials, results):
    """The flags of the trial with the lowest validation perplexity; one that diverged has none."""
    found = [(trial.result(results), trial) for trial in trials]
    found = [(line["valid_perplexity"], trial.key["trial"]) for line, trial in found if line.get("valid_perplexity")]
    return min(found)[1] - 1


def penn_treebank():
    runs = []
    for system, flags in SYSTEMS.items():
        common = f"{flags} {PTB_RECIPE}"
        if system not in TRIED:
            continue
        trials = [
            Run(f"ptb-{system}-trial-{i}", "ptb-small-trials", "Penn Treebank, preset small, a quarter of the text",
                "language_model", "ptb-quarter", f"{common} {trial} --epochs 3", system=system, trial=i, seed=1)
            for i, trial in enumerate(PTB_TRIALS, 1)
        ]  # fmt: skip
        runs += trials
        chosen = lambda results, trials=trials: PTB_TRIALS[best(trials, results)]
        if system in HEADS:
            for seed in SEEDS:
                runs.append(Run(
                    f"ptb-{system}-seed-{seed}", "ptb-small", "Penn Treebank, preset small", "language_model", "ptb",
                    lambda results, seed=seed, common=common, chosen=chosen: f"{common} {chosen(results)} --epochs {PTB_EPOCHS} --evaluations 4 --seed {seed}",
                    trials, system=system, seed=seed,
                ))  # fmt: skip
    return runs


def multi30k():
    runs = []
    for head in HEADS:
        trials = [
            Run(f"multi30k-{head}-trial-{i}", "multi30k-trials", "Multi30k, German to English, a quarter of the pairs",
                "translation", "multi30k-quarter", f"--head {head} {trial} --epochs 4", system=head, trial=i, seed=1)
            for i, trial in enumerate(MULTI30K_TRIALS, 1)
        ]  # fmt: skip
        runs += trials
        for seed in SEEDS:
            flags = lambda results, head=head, seed=seed, trials=trials: (
                f"--head {head} {MULTI30K_TRIALS[best(trials, results)]} --epochs 4 --seed {seed}"
            )
            runs.append(
                Run(f"multi30k-{head}-seed-{seed}", "multi30k", "Multi30k, German to English", "translation", "multi30k",
                    flags, trials, system=head, seed=seed)
            )  # fmt: skip
    return runs


def all_runs():
    """Trials come first, then one seed of each task, then the other."""
    runs = penn_treebank() + multi30k()
    return sorted(runs, key=lambda run: (run.key.get("trial") is None, run.key.get("seed", 0)))


def split(lines, out, train, parts):
    """Writes texts with these lines: `train`, and the first and second half of the validation text."""
    half = len(lines) // 2
    for name, part in [("valid", lines[:half]), ("test", lines[half:])]:
        write(out.format(name), part)
    write(out.format("train"), train[: len(train) // parts])


def write(path, lines):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(lines)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.readlines()


def prepare(arguments):
    """Folders with the fixed half of each validation text as test text, and with a quarter of the training text."""
    if arguments.ptb:
        train, valid = [read(os.path.join(arguments.ptb, f"{name}.txt")) for name in ("train", "valid")]
        for folder, parts in [("ptb", 1), ("ptb-quarter", 4)]:
            split(valid, os.path.join(RUNS, folder, "{}.txt"), train, parts)
    if arguments.multi30k:
        for language in ("de", "en"):
            train, valid = [read(os.path.join(arguments.multi30k, f"{name}.{language}")) for name in ("train", "valid")]
            for folder, parts in [("multi30k", 1), ("multi30k-quarter", 4)]:
                split(valid, os.path.join(RUNS, folder, f"{{}}.{language}"), train, parts)


def load():
    if not os.path.exists(RESULTS):
        return []
    return [json.loads(line) for line in read(RESULTS) if line.strip()]


def evaluations(run):
    """Epoch, steps and validation perplexity of each evaluation, from the lines of --results."""
    path = run.path(".jsonl")
    if not os.path.exists(path):
        return [], 0.0
    by_steps = {line["steps"]: line for line in map(json.loads, read(path))}
    lines = [by_steps[steps] for steps in sorted(by_steps)]
    seconds = {}
    for line in lines:
        epoch = -(-line["epoch"] // 1)
        seconds[epoch] = max(seconds.get(epoch, 0.0), line["seconds"])
    return [[round(line["epoch"], 3), line["steps"], rounded("", line["valid_ppl"])] for line in lines], sum(seconds.values())


def value(flags, name):
    words = shlex.split(flags)
    return next((words[i + 1] for i, word in enumerate(words) if word == name), None)


def line_of(run, flags, output, commit):
    """The line of a run that is over. A training that diverged has no perplexity."""
    result = json.loads(next(line for line in reversed(output) if line.startswith("[{")))[0]
    curve, seconds = evaluations(run)
    line = {"figure": run.figure, "shape": run.shape, "implementation": "mos-head", **run.key, "head": result["head"]}
    line |= {"output": value(flags, "--output") or "full", "components": 1 if result["head"] == "softmax" else 5}
    line |= {"flags": " ".join(word for word in flags.split() if "{RUNS}" not in word), "parameters": result["parameters"]}
    for key in ["valid_perplexity", "test_perplexity", "scores", "scores_of", "renormalised_perplexity", "word_model"]:
        if result.get(key) is not None:
            line[key] = rounded(key, result[key])
    line |= {"evaluations": curve, "seconds": round(seconds, 1)}
    names = {"ptb": "DIR", "ptb-quarter": "QUARTER", "multi30k": "DIR", "multi30k-quarter": "QUARTER"}
    prefix = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    given = {"language_model": "--data", "translation": "--data"}[run.program]
    where = f"{given} {names.get(run.data, 'FILE.jsonl')}"
    shown = flags.replace("{RUNS}/", "")
    line["command"] = f"{prefix} cargo run --release -p lab --bin {run.program} -- {where} {shown}"
    today = datetime.date.today().isoformat()
    return line | {"processor": processor(physical_cores()), "date": today, "commit": commit}


class Runner:
    def __init__(self, runs, deadline, commit):
        self.runs, self.deadline, self.commit = runs, deadline, commit
        self.running, self.failed, self.lock = set(), set(), threading.Lock()

    def next(self):
        """The first run that has what it needs; `None` if none will have."""
        while time.time() < self.deadline:
            with self.lock:
                results = load()
                waiting = [run for run in self.runs if not run.result(results) and run.name not in self.failed]
                free = [run for run in waiting if run.name not in self.running]
                ready = [run for run in free if all(need.result(results) for need in run.needs)]
                if ready:
                    self.running.add(ready[0].name)
                    return ready[0], ready[0].resolved(results)
                if not self.running:
                    return None
            time.sleep(2)
        return None

    def work(self):
        while found := self.next():
            run, flags = found
            try:
                self.train(run, flags)
            except Exception as error:  # All others go on.
                print(f"{run.name}: {error}", file=sys.stderr)
                self.failed.add(run.name)
            with self.lock:
                self.running.discard(run.name)

    def train(self, run, flags):
        minutes = (self.deadline - time.time()) / 60
        command = [program(run.program), "--data", os.path.join(RUNS, run.data), *flags.replace("{RUNS}", RUNS).split()]
        command += ["--save", run.path(".safetensors"), "--minutes", f"{max(minutes, 0.1):.2f}"]
        command += ["--results", run.path(".jsonl"), "--json"]
        print(f"{time.strftime('%H:%M')} {run.name}: {flags}", file=sys.stderr, flush=True)
        with open(run.path(".log"), "a", encoding="utf-8") as log:
            subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, preexec_fn=lambda: os.nice(10))
        output = read(run.path(".log"))
        if not any(line.startswith("[{") for line in output):
            if any("the same command continues" in line for line in output[-3:]):
                return
            raise RuntimeError(f"failed: see {run.path('.log')}")
        line = line_of(run, flags, output, self.commit)
        with self.lock, open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        found = " ".join(f"{key} {line[key]}" for key in ("valid_perplexity", "test_perplexity") if key in line)
        print(f"{time.strftime('%H:%M')} {run.name}: {found}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--ptb", "--multi30k", "--switchboard"):
        parser.add_argument(flag)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--force", action="store_true", help="runs code that is not committed")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    given = [task for task in ("ptb", "multi30k", "switchboard") if getattr(arguments, task)]
    runs = all_runs()
    if arguments.list:
        results = load()
        for run in runs:
            line = run.result(results)
            print(f"{run.name:28} {line['valid_perplexity'] if line else '-':>8}")
        return
    runs = [run for run in runs if run.name.split("-")[0] in given]
    if arguments.names:
        wanted = [run for run in runs if any(run.name.startswith(name) for name in arguments.names)]
        runs = [run for run in runs if run in wanted or any(run in other.needs for other in wanted)]
    changed = git("status", "--porcelain", "--", *MEASURED)
    if changed and not arguments.force:
        sys.exit(f"commit first, so that the results can name what was run:\n{changed}")
    os.makedirs(RUNS, exist_ok=True)
    prepare(arguments)
    runner = Runner(runs, time.time() + 60 * arguments.minutes, git("rev-parse", "--short", "HEAD").strip())
    workers = [threading.Thread(target=runner.work) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if runner.failed:
        sys.exit(f"failed: {', '.join(sorted(runner.failed))}")


if __name__ == "__main__":
    main()
