"""The runs of lab/run_all.sh: which there are, what each needs, and how its result becomes a line of benches/results."""

import argparse
import datetime
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, "scripts/measure")
from lines import rounded  # noqa: E402
from machine import git, gpu, physical_cores, processor, program  # noqa: E402

RESULTS = os.environ.get("LAB_RESULTS", "benches/results/runs.jsonl")
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
# What came after the mixture of softmaxes: each has trials of its own, and two seeds.
SUCCESSORS = {
    "sampled": SYSTEMS["sampled"],
    "sigsoftmax": "--head softmax --logit-function sigsoftmax",
    "mos-sigsoftmax": "--head mos --logit-function sigsoftmax",
    "mixtape": "--head mixtape",
}
# Both go on from the softmax of their seed for as many epochs. Their trials are an epoch of the whole text.
CONTINUED = {
    "grown": "--grow {RUNS}/ptb-softmax-seed-SEED.safetensors",
    "control": "--head softmax --resume {RUNS}/ptb-softmax-seed-SEED.safetensors",
}
# The contexts whose log-probabilities have the rank that is measured.
CONTEXTS = 2000
# The others have the learning rate of the mixture's best trial.
TRIED = [*HEADS, "sampled"]
# Minutes of equal time; each system has these on one core, at the seconds of a step on a quiet machine.
MINUTES = 40

# Multi30k over words, byte pairs and codes (Kong et al., 2019): as many pieces as codes, contexts as wide as the model.
MODELS = {
    "LSTM": "--lr 0.0037 --dropout 0.16 --epochs 4 --context 256",
    "Transformer": "--architecture transformer --hidden 192 --layers 2 --attention-heads 4 --inner 768 --context 192"
    " --lr 0.003 --warmup 400 --decay 0.65 --label-smoothing 0.1 --epochs 6",
}
VOCABULARIES = {"words": "", "byte pairs": " --vocab bpe --vocab-size 1200", "codes": " --vocab hybrid --codes 1200"}
# The Transformer's dropout. The LSTM has the best setting of the mixture of softmaxes over words.
TRANSFORMER_TRIALS = ["--dropout 0.1", "--dropout 0.2"]

# Multi30k: Adam's learning rate and the dropout, with linear contexts.
MULTI30K_TRIALS = ["--lr 0.002 --dropout 0.16", "--lr 0.0037 --dropout 0.16", "--lr 0.002 --dropout 0.3", "--lr 0.0037 --dropout 0.3"]

# The steps of an epoch of the whole text; a word has 1.14 codes.
STEPS = {"codes": 1593}
WORD_STEPS = 1397

# The papers' models: the words of their texts, and positions of a step.
PRESETS = {
    "ptb-mos": (10_000, 12 * 68),
    "ptb-moc": (10_000, 12 * 68),
    "ptb-softmax": (10_000, 20 * 68),
    "wt2-mos": (33_278, 15 * 68),
    "wt2-moc": (33_278, 15 * 68),
    "wt2-softmax": (33_278, 80 * 68),
    "1b-mos": (100_000, 60 * 35),
    "1b-softmax": (100_000, 60 * 35),
}

# Captions of drawn images: Adam's learning rate, by fewer images and epochs. Without the image there is less to learn.
CAPTION_TRIALS = ["--lr 0.002", "--lr 0.004", "--lr 0.008"]
CAPTIONS = "--batch 8 --decay 0.75 --dropout 0.1"
CAPTION_EPOCHS = {"the image": 10, "nothing": 3}

# Switchboard: Adam's learning rate, the dropout and the activation of the contexts, which a softmax does not have.
SWITCHBOARD_TRIALS = [
    "--lr 0.008 --dropout 0.3 --activation identity",
    "--lr 0.008 --dropout 0.4 --activation identity",
    "--lr 0.012 --dropout 0.4 --activation identity",
    "--lr 0.005 --dropout 0.3 --activation tanh",
]
SWITCHBOARD_EPOCHS = 6

# The character LSTM, until it no longer improves.
SPELL = "--hidden 256 --lr 0.003 --decay 0.8 --epochs 40 --patience 2"


class Run:
    """One training: the flags of a program, or how they follow from the results that it needs."""

    def __init__(self, name, figure, shape, program, data, flags, needs=(), files=(), settings=(), **key):
        """`files`: the runs whose checkpoints the flags name. `settings`: the flags that trials differ in."""
        self.name, self.figure, self.shape, self.program, self.data = name, figure, shape, program, data
        self.flags, self.needs, self.files, self.settings, self.key = flags, [*needs, *files], files, settings, key

    def path(self, ending):
        return os.path.join(RUNS, f"{self.name}{ending}")

    def result(self, results):
        is_mine = lambda line: line["figure"] == self.figure and all(line.get(key) == of for key, of in self.key.items())
        # The last line is the one that the tables show.
        return next((line for line in reversed(results) if is_mine(line)), None)

    def is_needed(self, results, others):
        """Whether a run that has no line yet reads its checkpoint."""
        return any(self in run.files and not run.result(results) for run in others)

    def is_done(self, results, others):
        """Whether there is its line and, if it is needed, its checkpoint."""
        return self.result(results) and (not self.is_needed(results, others) or os.path.exists(self.path(".safetensors")))

    def resolved(self, results):
        return self.flags(results) if callable(self.flags) else self.flags


class StepSeconds(Run):
    """The time of a step, for which the machine must have nothing else to do."""


class Bottleneck(Run):
    """The rank of a model's log-probabilities, and the share of the logits' gradient that its decoder passes on."""


def best(trials, results):
    """The setting of the trial with the lowest validation perplexity; one that diverged has none."""
    lines = [line for trial in trials if (line := trial.result(results)).get("valid_perplexity")]
    if not lines:
        raise RuntimeError(f"all trials diverged: {', '.join(trial.name for trial in trials)}")
    return min(lines, key=lambda line: line["valid_perplexity"])["setting"]


def language_model(name, figure, data, flags, needs=(), **more):
    shape = "Penn Treebank, preset small" + (", a quarter of the text" if data == "ptb-quarter" else "")
    return Run(name, figure, shape, "language_model", data, flags, needs, settings=PTB_TRIALS, **more)


def small_trials(system, flags):
    """Trials of every learning rate on a quarter of the text."""
    return [
        language_model(f"ptb-{system}-trial-{i}", "ptb-small-trials", "ptb-quarter", f"{flags} {PTB_RECIPE} {trial} --epochs 3",
                       system=system, trial=i, seed=1)
        for i, trial in enumerate(PTB_TRIALS, 1)
    ]  # fmt: skip


def small_seeds(system, figure, flags, trials, epochs=PTB_EPOCHS, files=None):
    """Two seeds of the best trial. `files` has a run for each seed, whose checkpoint the flags name."""
    runs = []
    for seed in SEEDS:

        def final(results, seed=seed):
            return f"{flags.replace('SEED', str(seed))} {PTB_RECIPE} {best(trials, results)} --epochs {epochs} --evaluations 4 --seed {seed}"

        more = {"files": [files[seed]]} if files else {}
        runs.append(language_model(f"ptb-{system}-seed-{seed}", figure, "ptb", final, trials, **more, system=system, seed=seed))
    return runs


def step_seconds(system, flags, figure="step-seconds", **more):
    """Of the systems of equal time, or of the table of successors, which may be those of another machine."""
    return StepSeconds(f"ptb-{system}-{figure}", figure, "Penn Treebank, preset small", "language_model", "ptb",
                       f"{flags} {PTB_RECIPE}", system=system, **more)  # fmt: skip


def penn_treebank():
    runs, tried = [], {}
    for system, flags in SYSTEMS.items():
        if system in TRIED:
            tried[system] = small_trials(system, flags)
            runs += tried[system]
        trials = tried.get(system, tried.get("mos"))
        if system in HEADS:
            runs += small_seeds(system, "ptb-small", flags, trials)
        seconds = step_seconds(system, flags + (" --table random" if system == "codes" else ""))
        runs.append(seconds)
        # The mixture of softmaxes is trained for longer than the equal time already.
        if system != "mos":

            def equal(results, system=system, flags=flags, trials=trials, seconds=seconds):
                epoch = STEPS.get(system, WORD_STEPS) * seconds.result(results)["seconds"]
                table = " --rounds 2 --table-file {RUNS}/ptb-table.safetensors" if system == "codes" else ""
                chosen = f"{flags} {PTB_RECIPE} {best(trials, results)}"
                return f"{chosen} --epochs {math.ceil(60 * MINUTES / epoch)} --evaluations 4{table}"

            runs.append(language_model(f"ptb-{system}-equal", "equal-time", "ptb", equal, [*trials, seconds], system=system, seed=1))
    runs += successors({run.name: run for run in runs})
    word = next(run for run in runs if run.name == "ptb-softmax-seed-1")
    flags = f"--spell {{RUNS}}/{word.name}.safetensors {SPELL}"
    runs.append(Run("ptb-spell", "spell", "Penn Treebank", "language_model", "ptb", flags, files=[word], seed=1))
    return runs


def successors(known):
    """The systems after the mixture of softmaxes, and the bottleneck of all of them. `known`: the runs above, by name."""
    runs = []
    for system, flags in SUCCESSORS.items():
        trials = [known.get(trial.name, trial) for trial in small_trials(system, flags)]
        runs += [trial for trial in trials if trial.name not in known]
        runs += small_seeds(system, "successors", flags, trials)
    softmax = {seed: known[f"ptb-softmax-seed-{seed}"] for seed in SEEDS}
    for system, flags in CONTINUED.items():
        before = PTB_EPOCHS if system == "control" else 0
        trials = [
            language_model(f"ptb-{system}-trial-{i}", "successors-trials", "ptb",
                           f"{flags.replace('SEED', '1')} {PTB_RECIPE} {trial} --epochs {before + 1}",
                           files=[softmax[1]], system=system, trial=i, seed=1)
            for i, trial in enumerate(PTB_TRIALS, 1)
        ]  # fmt: skip
        runs += trials + small_seeds(system, "successors", flags, trials, before + PTB_EPOCHS, softmax)
    timed = {head: SYSTEMS[head] for head in HEADS} | SUCCESSORS
    runs += [step_seconds(system, flags, "successors-seconds") for system, flags in timed.items()]
    grown = CONTINUED["grown"].replace("SEED", "1")
    runs.append(step_seconds("grown", grown, "successors-seconds", files=[softmax[1]]))
    finals = {run.name: run for run in [*known.values(), *runs]}
    for system in [*HEADS, *SUCCESSORS, *CONTINUED]:
        model = finals[f"ptb-{system}-seed-1"]
        flags = f"--json --contexts {CONTEXTS} {{RUNS}}/{model.name}.safetensors"
        runs.append(Bottleneck(f"ptb-{system}-bottleneck", "successors-bottleneck", "Penn Treebank, preset small", "bottleneck", "ptb",
                               flags, files=[model], system=system))  # fmt: skip
    return runs


def translation(task, data, shape, settings, epochs, part=("", "")):
    """Trials of every head, and two seeds of the best. `part`: what the trials are of, and the flag for it."""
    runs = []
    for head in HEADS:
        trials = [
            Run(f"{task}-{head}-trial-{i}", f"{task}-trials", shape + part[0], "translation", data,
                f"--head {head} {trial} --epochs {epochs}{part[1]}", settings=settings, system=head, trial=i, seed=1)
            for i, trial in enumerate(settings, 1)
        ]  # fmt: skip
        runs += trials
        for seed in SEEDS:
            flags = lambda results, head=head, seed=seed, trials=trials: (
                f"--head {head} {best(trials, results)} --epochs {epochs} --seed {seed}"
            )
            runs.append(Run(f"{task}-{head}-seed-{seed}", task, shape, "translation", data, flags, trials,
                            settings=settings, system=head, seed=seed))  # fmt: skip
    return runs


def vocabularies():
    """One softmax and nine, over words, byte pairs and codes. The first run of a seed over codes learns its table."""
    runs, learned, tried, task = [], {}, {}, ("Multi30k, German to English", "translation", "multi30k")

    def add(name, figure, flags, needs, seed, **key):
        table = f" --table-file {{RUNS}}/multi30k-table-{seed}.safetensors" if key["system"].endswith("codes") else ""
        trained = lambda results: f"{flags(results)}{table} --beam 4 --evaluations 2 --seed {seed}"
        needs = [*needs, learned[seed]] if table and seed in learned else needs
        runs.append(Run(name, figure, *task, trained, needs, settings=TRANSFORMER_TRIALS, **key, seed=seed))
        if table:
            learned.setdefault(seed, runs[-1])
        return runs[-1]

    for (model, recipe), (tokens, vocabulary) in itertools.product(MODELS.items(), VOCABULARIES.items()):
        for head in ("softmax", "mos"):
            key = {"system": f"{model}, {tokens}", "head": head}
            name = f"multi30k-{model}-{tokens}-{head}".lower().replace(" ", "-")
            flags = f"--head {head} --components 9 {recipe}{vocabulary}"
            # Codes have the setting of as many byte pairs.
            settings = TRANSFORMER_TRIALS if model == "Transformer" and tokens != "codes" else []
            trials = [
                add(f"{name}-trial-{i}", "multi30k-transformer-trials", lambda _, all=f"{flags} {dropout}": all, [], 1, **key, trial=i)
                for i, dropout in enumerate(settings, 1)
            ]  # fmt: skip
            trials = tried[model, head] = trials or tried.get((model, head), [])

            def chosen(results, flags=flags, trials=trials):
                return f"{flags} {best(trials, results)}" if trials else flags

            random_table = lambda results, chosen=chosen: f"{chosen(results)} --table random"
            seconds = random_table if tokens == "codes" else chosen
            runs.append(StepSeconds(f"{name}-seconds", "vocabulary-seconds", *task, seconds, trials, **key))
            for seed in SEEDS:
                add(f"{name}-seed-{seed}", "multi30k-vocabularies", chosen, trials, seed, **key)
    return runs


def captions():
    """Captions of drawn images by a softmax and by a mixture, and by the same decoders without the image."""
    runs, task = [], ("drawn images", "captions", None)
    for head in ("softmax", "mos"):
        common = f"--head {head} {CAPTIONS}"
        trials = [
            Run(f"captions-{head}-trial-{i}", "captions-trials", *task, f"{common} {lr} --images 8000 --epochs 5 --seed 1",
                settings=CAPTION_TRIALS, system=head, trial=i, seed=1)
            for i, lr in enumerate(CAPTION_TRIALS, 1)
        ]  # fmt: skip
        runs += trials
        for (sees, epochs), seed in itertools.product(CAPTION_EPOCHS.items(), SEEDS):
            ending = f"--images 16000 --epochs {epochs} --seed {seed}" + (" --blind" if sees == "nothing" else "")
            flags = lambda results, common=common, trials=trials, ending=ending: f"{common} {best(trials, results)} {ending}"
            name = f"captions-{head}-{'blind-' if sees == 'nothing' else ''}seed-{seed}"
            key = {"system": f"{head}, {sees}", "sees": sees, "head": head}
            runs.append(Run(name, "captions", *task, flags, trials, settings=CAPTION_TRIALS, **key, seed=seed))
    return runs


def all_runs():
    """Trials come first, then one seed of each task, then the other."""
    runs = penn_treebank()
    quarter = (", a quarter of the pairs", " --part 0.25")
    runs += translation("multi30k", "multi30k", "Multi30k, German to English", MULTI30K_TRIALS, 4, quarter)
    runs += vocabularies()
    runs += captions()
    runs += translation("switchboard", "dialogues.jsonl", "60 Switchboard dialogues", SWITCHBOARD_TRIALS, SWITCHBOARD_EPOCHS)
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


def read(path, start=0):
    with open(path, encoding="utf-8") as file:
        file.seek(start)
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
            split(valid, os.path.join(RUNS, "multi30k", f"{{}}.{language}"), train, 1)
    if arguments.switchboard:
        shutil.copy(arguments.switchboard, os.path.join(RUNS, "dialogues.jsonl"))


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


def line_of(run, flags, output, origin):
    """The line of a run that is over. A training that diverged has no perplexity."""
    result = json.loads(next(line for line in reversed(output) if line.startswith("[{")))[0]
    curve, seconds = evaluations(run)
    line = {"figure": run.figure, "shape": run.shape, "implementation": "mos-head", **run.key, "head": result["head"]}
    components = {"softmax": 1, "mixtape": 4}.get(result["head"]) or int(value(flags, "--components") or 5)
    line |= {"output": value(flags, "--output") or "full", "components": result.get("components") or components}
    setting = next((setting for setting in run.settings if f" {setting} " in f" {flags} "), None)
    line |= {"setting": setting} if setting else {}
    line |= {key: rounded(key, result[key]) for key in ["parameters", "vocab_size", "peak_mib"] if result.get(key) is not None}
    result["word_perplexity"] = result.get("word_model", {}).get("valid_perplexity")
    for key in ["floor_nll", "valid_perplexity", "test_perplexity", "renormalised_perplexity", "word_perplexity", "scores_of"]:
        if result.get(key) is not None:
            line[key] = rounded(key, result[key])
    if "scores" in result:
        line["scores"] = {name: rounded(name, score) for name, score in result["scores"].items()}
    line |= {"evaluations": curve, "seconds": round(seconds, 1)}
    line["command"] = command_of(run, flags)
    return line | origin


def command_of(run, flags):
    return " ".join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), shown(run, flags)])


def shown(run, flags):
    """The command as a reader types it."""
    if isinstance(run, Bottleneck):
        return f"cargo run --release -p lab --bin {run.program} -- {flags.replace('{RUNS}/', '')}"
    data = "FILE.jsonl" if (run.data or "").endswith(".jsonl") else "QUARTER" if (run.data or "").endswith("-quarter") else "DIR"
    return " ".join([f"cargo run --release -p lab --bin {run.program} --", *data_flags(run, data), flags.replace("{RUNS}/", "")])


def data_flags(run, data):
    """The flags for this path of the data, which a program that makes its own data does not have."""
    return [] if run.data is None else ["--dialogue" if run.data.endswith(".jsonl") else "--data", data]


def origin(commit, device="cpu"):
    today = datetime.date.today().isoformat()
    return {"processor": gpu() if device == "cuda" else processor(physical_cores()), "date": today, "commit": commit}


def paused(run, data, flags, environment, minutes):
    """Seconds of a step, of a training that is stopped after some minutes."""
    command = [program(run), "--data", data, *flags.split(), "--save", os.path.join(RUNS, "seconds.safetensors")]
    for file in ("seconds.safetensors", "seconds.leg.safetensors"):
        if os.path.exists(os.path.join(RUNS, file)):
            os.remove(os.path.join(RUNS, file))
    command += ["--minutes", str(minutes)]
    print(f"  {' '.join(command)}", file=sys.stderr, flush=True)
    output = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"paused after (\d+) steps of ([\d.]+) s", output)
    if not found:
        raise RuntimeError(f"no pause in:\n{output}")
    return {"steps": int(found[1]), "seconds": float(found[2])}


def random_text(words):
    """A folder with a text in which each of these words occurs, and others by Zipf's law."""
    folder = os.path.join(RUNS, f"random-{words}")
    names = ["<unk>", *(f"w{i}" for i in range(words - 2))]
    draw = random.Random(1)
    drawn = draw.choices(names, [1 / (i + 1) for i in range(len(names))], k=400_000)
    lines = lambda text: [" ".join(text[i : i + 20]) + "\n" for i in range(0, len(text), 20)]
    write(os.path.join(folder, "train.txt"), lines([*names, *drawn]))
    write(os.path.join(folder, "valid.txt"), lines(drawn[:400]))
    return folder


def measure_seconds(runs, presets, commit):
    """The seconds of a step of presets on all cores, and of the systems of equal time on one."""
    results = load()
    lines = []
    for preset, (words, positions) in presets.items():
        found = paused("language_model", random_text(words), f"--preset {preset}", {"CANDLE_BARRIER_POOL_SPIN_LIMIT": "100"}, 1)
        command = f"lab/run_all.sh --seconds: language_model --preset {preset} for a minute, {words} words"
        lines.append({"figure": "preset-seconds", "preset": preset, "positions": positions, "command": command} | found)
    for run in runs:
        if isinstance(run, StepSeconds) and os.path.isdir(os.path.join(RUNS, run.data)):
            flags = run.resolved(results)
            found = paused(run.program, os.path.join(RUNS, run.data), flags.replace("{RUNS}", RUNS), ENVIRONMENT, 0.7)
            lines.append({"figure": run.figure, "shape": run.shape, **run.key, "command": command_of(run, flags)} | found)
    add([{"shape": "Penn Treebank", "implementation": "mos-head"} | line | origin(commit) for line in lines])


def add(lines):
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


class Runner:
    def __init__(self, runs, deadline, commit, device):
        self.runs, self.deadline, self.commit, self.device = runs, deadline, commit, device
        self.running, self.failed, self.lock = set(), set(), threading.Lock()

    def next(self):
        """The first run that has what it needs; `None` if none will have."""
        while time.time() < self.deadline:
            with self.lock:
                results = load()
                is_done = lambda run: run.is_done(results, self.runs)
                waiting = [run for run in self.runs if not is_done(run) and run.name not in self.failed]
                free = [run for run in waiting if run.name not in self.running and not isinstance(run, StepSeconds)]
                ready = [run for run in free if all(is_done(need) for need in run.needs)]
                if ready:
                    self.running.add(ready[0].name)
                    return ready[0]
                if not self.running:
                    return None
            time.sleep(2)
        return None

    def flags(self, run, results):
        is_on_device = self.device != "cpu" and not isinstance(run, Bottleneck)
        return run.resolved(results) + (f" --device {self.device}" if is_on_device else "")

    def work(self):
        while run := self.next():
            try:
                (self.measure if isinstance(run, Bottleneck) else self.train)(run, self.flags(run, load()))
            except Exception as error:  # All others go on.
                print(f"{run.name}: {error}", file=sys.stderr)
                self.failed.add(run.name)
            with self.lock:
                self.running.discard(run.name)

    def measure(self, run, flags):
        """Adds the line of a model's bottleneck."""
        command, found = [program(run.program), *flags.replace("{RUNS}", RUNS).split()], {}
        for more in ([], ["--gradient"]):
            output = subprocess.run(command + more, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout
            found |= json.loads(output.splitlines()[-1])[0]
        keys = ["context", "contexts", "rank", "gradient_share"]
        line = {"figure": run.figure, "shape": run.shape, "implementation": "mos-head", **run.key}
        line |= {key: rounded(key, found[key]) for key in keys} | {"command": f"{command_of(run, flags)} (and with --gradient)"}
        with self.lock:
            add([line | origin(self.commit)])

    def train(self, run, flags):
        """Runs a program, unless another run has had the same flags, as the best trial has."""
        results = load()
        same = next((line for line in results if line["command"] == command_of(run, flags)), None)
        if same and not run.is_needed(results, self.runs):
            kept = {key: value for key, value in same.items() if key != "trial"}
            with self.lock:
                return add([kept | {"figure": run.figure, **run.key}])
        minutes = (self.deadline - time.time()) / 60
        # The state of a leg is that of a run which went on from another file.
        here = re.sub(r"--resume \S+ ", "", flags) if os.path.exists(run.path(".leg.safetensors")) else flags
        command = [program(run.program), *data_flags(run, os.path.join(RUNS, run.data or "")), *here.replace("{RUNS}", RUNS).split()]
        command += ["--save", run.path(".safetensors"), "--minutes", f"{max(minutes, 0.1):.2f}"]
        command += ["--results", run.path(".jsonl"), "--json"]
        print(f"{time.strftime('%H:%M')} {run.name}: {flags}", file=sys.stderr, flush=True)
        with open(run.path(".log"), "a", encoding="utf-8") as log:
            before = log.tell()
            subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, preexec_fn=lambda: os.nice(10))
        # Earlier legs, or another run of this name, wrote what is before.
        output = read(run.path(".log"), before)
        if not any(line.startswith("[{") for line in output):
            if any("the same command continues" in line for line in output[-3:]):
                return
            raise RuntimeError(f"failed: see {run.path('.log')}")
        line = line_of(run, flags, output, origin(self.commit, self.device))
        with self.lock:
            add([line] if not run.result(load()) else [])
        found = " ".join(f"{key} {line[key]}" for key in ("valid_perplexity", "test_perplexity") if key in line)
        print(f"{time.strftime('%H:%M')} {run.name}: {found}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--ptb", "--multi30k", "--switchboard"):
        parser.add_argument(flag)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where trainings run, but for --seconds")
    parser.add_argument("--force", action="store_true", help="runs code that is not committed")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    given = [task for task in ("ptb", "multi30k", "switchboard") if getattr(arguments, task)]
    runs = all_runs()
    if arguments.list:
        results = load()
        for run in runs:
            line = run.result(results) or {}
            found = next((line[key] for key in ("valid_perplexity", "seconds", "rank") if key in line), "-")
            print(f"{run.name:28} {found:>8}")
        return
    runs = [run for run in runs if run.data is None or run.name.split("-")[0] in given]
    if arguments.names:
        wanted = [run for run in runs if any(run.name.startswith(name) for name in arguments.names)]
        for run in wanted:  # The list grows until it has what each of its runs needs.
            wanted += [need for need in run.needs if need not in wanted]
        runs = [run for run in runs if run in wanted]
    changed = git("status", "--porcelain", "--", *MEASURED)
    if changed and not arguments.force:
        sys.exit(f"commit first, so that the results can name what was run:\n{changed}")
    os.makedirs(RUNS, exist_ok=True)
    prepare(arguments)
    commit = git("rev-parse", "--short", "HEAD").strip()
    if arguments.seconds:
        return measure_seconds(runs, {} if arguments.names else PRESETS, commit)
    runner = Runner(runs, time.time() + 60 * arguments.minutes, commit, arguments.device)
    workers = [threading.Thread(target=runner.work) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if runner.failed:
        sys.exit(f"failed: {', '.join(sorted(runner.failed))}")
    results = load()
    left = [run.name for run in runs if not run.result(results)]
    print(f"left: {', '.join(left)}" if left else "all is done", file=sys.stderr)


if __name__ == "__main__":
    main()
