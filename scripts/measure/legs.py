"""The legs of scripts/measure.sh: runs programs in turn, and writes the medians of what they print."""

import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

from age import check
from lines import assignment_lines, composed_step, decoding_lines, json_of, loss_alone, rounded, sizes, training_step
from machine import git, physical_cores, processor, program

RESULTS = "benches/results"
WORK = "target/measure"
FILES = {
    "steps": ["step", "without-gradients", "dtypes", "instruction-sets", "positions", "memory", "confident", "budget"],
    "decoding": ["decoding", "decoding-heads"],
    "outputs": ["output-step"],
    "examples": ["language-model", "fine-tune"],
    "codes": ["assignment"],
}
# What must be committed, so that a commit says what was measured.
MEASURED = ["src", "codes", "lab", "benches/*.rs", "benches/peers", "tests/common", "Cargo.toml", "Cargo.lock", "build.rs"]
MEASURED += ["scripts/measure", "scripts/measure.sh"]
SENTENCES = 4700


class Run:
    """A program that is run several times, and the measurement that its JSON becomes."""

    def __init__(self, command, display, convert, later=(), environment=None):
        """`later`: flags of all runs but the first, which may measure more."""
        self.command, self.display, self.convert, self.later = command, display, convert, list(later)
        self.environment = environment or {}
        self.lines = []

    def run(self):
        command = self.command + (self.later if self.lines else [])
        prefix = "".join(f"{name}={value} " for name, value in self.environment.items())
        print(f"  {prefix}{' '.join(command)}", file=sys.stderr)
        output = subprocess.run(
            command, env=os.environ | self.environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        self.lines.append(self.convert(output))

    def line(self):
        """The median of each number, and all else of the first run."""
        line = dict(self.lines[0])
        for key, value in line.items():
            numbers = [line[key] for line in self.lines if isinstance(line.get(key), (int, float))]
            if isinstance(value, float):
                line[key] = statistics.median(numbers)
        prefix = "".join(f"{name}={value} " for name, value in self.environment.items())
        return line | {"command": prefix + self.display, "runs": len(self.lines)}


class Legs:
    def __init__(self, args):
        self.quick, self.python, self.peers, self.data = args.quick, args.python, not args.ours, args.data
        self.folder = f"{WORK}/quick" if args.quick else RESULTS
        self.failed = []
        for folder in (self.folder, WORK):
            os.makedirs(folder, exist_ok=True)
        cores = physical_cores()
        os.environ.setdefault("RAYON_NUM_THREADS", str(cores))
        cores = int(os.environ["RAYON_NUM_THREADS"])
        self.origin = {
            "processor": os.environ.get("MOS_HEAD_PROCESSOR") or processor(cores),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": git("rev-parse", "--short=7", "HEAD").strip(),
        }

    def in_turn(self, runs, rounds=3):
        """Runs each program once in each round, and records what they measure."""
        alive = list(runs)
        for _ in range(1 if self.quick else rounds):
            for run in list(alive):
                try:
                    run.run()
                except (subprocess.CalledProcessError, ValueError, KeyError, IndexError) as error:
                    self.fail(f"{run.display}: {error}")
                    alive.remove(run)
        lines = [run.line() for run in alive]
        self.record(lines)
        return lines

    def fail(self, message):
        print(f"failed: {message}", file=sys.stderr)
        self.failed.append(message)

    def record(self, lines):
        for line in lines:
            name = next(name for name, figures in FILES.items() if line["figure"] in figures)
            told = {key: line[key] for key in ("runs", "command") if key in line}
            line = {key: value for key, value in line.items() if key not in told} | told | self.origin
            line = {key: rounded(key, value) for key, value in line.items()}
            with open(f"{self.folder}/{name}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(json.dumps(line, ensure_ascii=False))

    def step_time(self, figure, flags, convert, later=(), environment=None, reps=1):
        flags = flags.split() + ["--reps", str(1 if self.quick else reps), "--warmup", "1"]
        display = "cargo run --release -p lab --bin step_time -- " + " ".join(flags)
        command = [program("step_time"), *flags]

        def converted(output):
            return {"figure": figure, "implementation": "mos-head"} | convert(json_of(output))

        return Run(command, display, converted, later, environment)

    def peer(self, program, flags, **extra):
        """Nothing without PyTorch."""
        if not self.peers:
            return []
        command = [self.python, f"benches/peers/{program}.py", *flags.split()]
        command += ["--threads", os.environ["RAYON_NUM_THREADS"]]
        display = f"python benches/peers/{program}.py {flags}"

        def converted(output):
            line = json_of(output) | extra
            return {key: value for key, value in line.items() if key not in ("threads", "loss", "steps")}

        return [Run(command, display, converted)]

    def criterion(self, bench, pattern, seconds):
        """Nanoseconds by the name of a benchmark."""
        home = os.path.abspath(f"{WORK}/criterion")
        shutil.rmtree(home, ignore_errors=True)
        command = ["cargo", "bench", "--locked", "--bench", bench, "--", pattern]
        command += ["--warm-up-time", str(seconds / 2), "--measurement-time", str(seconds)]
        print("  " + " ".join(command), file=sys.stderr)
        with open(f"{WORK}/criterion.log", "w") as log:
            environment = os.environ | {"CRITERION_HOME": home}
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        found = {}
        for folder, _, files in os.walk(home):
            if os.path.basename(folder) == "new" and "estimates.json" in files:
                with open(f"{folder}/benchmark.json") as file:
                    name = json.load(file)["full_id"]
                with open(f"{folder}/estimates.json") as file:
                    found[name] = json.load(file)["median"]["point_estimate"]
        return found

    def steps(self):
        """The loss and all gradients."""
        ours, eager, compile = "ours", "eager", "compile"
        auto, large = "linear-cross-entropy --chunk auto", "linear-cross-entropy --chunk 512"
        shapes = [
            ("ptb", 840, 3, [ours, compile, eager, "composed", "products"]),
            ("wt2", 1050, 1, [ours, compile]),
            ("wt2", 210, 3, [ours, compile, eager]),
            ("1b", 210, 3, [ours, compile, eager]),
            ("llm", 2048, 1, [ours, eager, compile, large, auto, "products"]),
            ("llm", 410, 2, [ours, eager, compile]),
            ("llm", 128, 3, [ours, eager, compile, auto, "products"]),
        ]
        if self.quick:
            shapes = [("small", 60, 1, [ours, compile, eager, "composed", "products"])]
            shapes += [("small-softmax", 60, 1, [auto, large])]
        for shape, positions, reps, implementations in shapes:
            runs = []
            for implementation in implementations:
                if implementation == ours:
                    # The mixture and the products are in the same process.
                    flags = f"--shape {shape} --tokens {positions}"
                    runs.append(self.step_time("step", flags, training_step, ["--step-only"], reps=reps))
                elif implementation == "composed":
                    flags = f"--shape {shape} --tokens {positions} --impl composed"
                    runs.append(self.step_time("step", flags, composed_step))
                else:
                    flags = f"--shape {shape} --positions {positions} --implementation {implementation}"
                    runs += self.peer("step", f"{flags} --reps {1 if implementation == auto else reps}")
            # A step of many positions takes as long as several of few.
            self.in_turn(runs, rounds=2 if positions > 1000 else 3)

    def without_gradients(self):
        """The loss alone."""
        for shape, positions in [("ptb", 840), ("wt2", 210), ("1b", 210), ("llm", 128)]:
            shape, positions = ("small", 60) if self.quick else (shape, positions)
            flags = f"--shape {shape} --tokens {positions} --forward-only"
            self.in_turn([self.step_time("without-gradients", flags, loss_alone, reps=5)], rounds=1)
            if self.quick:
                break

    def dtypes(self):
        """Other element types, and products of f32 in bf16."""
        shape = "small" if self.quick else "ptb"
        cases = [(shape, "bf16", ""), (shape, "f32", " --bf16-products"), (shape, "f16", ""), (shape, "f64", "")]
        cases += [] if self.quick else [("llm", "bf16", "")]
        for shape, dtype, products in cases:

            def convert(line, dtype=dtype, products=products):
                line = training_step(line)
                del line["products_seconds"]
                return line | {"dtype": f"{dtype}, products in bf16" if products else dtype}

            runs = [self.step_time("dtypes", f"--shape {shape} --dtype {dtype}{products}", convert, reps=3)]
            if dtype == "bf16":
                for implementation in ("compile", "products"):
                    flags = f"--shape {shape} --dtype {dtype} --implementation {implementation} --reps 3"
                    runs += self.peer("step", flags, figure="dtypes")
            self.in_turn(runs, rounds=1)

    def instruction_sets(self):
        """Each instruction set that this processor has."""
        shape, found = "small" if self.quick else "ptb", []
        names = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "scalar": "scalar"}

        def convert(line):
            kept = sizes(line) | {"row_kernels": names[line["kernels"]]}
            mixture, products = line["mixture_seconds"], line["gemm3_seconds"]
            kept |= {"mixture_seconds": mixture, "products_seconds": products}
            return kept | {"mixture_over_products": mixture / products}

        for kernels in (None, "avx2", "scalar"):
            environment = {"MOS_HEAD_SIMD": kernels} if kernels else {}
            if kernels not in found:
                run = self.step_time("instruction-sets", f"--shape {shape}", convert, (), environment, reps=3)
                self.in_turn([run], rounds=1)
                found += [key for key, name in names.items() if run.lines and name == run.lines[0]["row_kernels"]]

    def positions(self):
        """Memory as the number of positions grows."""
        shape, numbers = ("small", (60, 240)) if self.quick else ("ptb", (840, 3360, 13_440))

        def convert(line):
            memory = {"workspace_mib": line["workspace_mib"], "extra_mib": line["peak_extra_mib"]}
            return sizes(line) | memory

        for positions in numbers:
            flags = f"--shape {shape} --tokens {positions} --step-only"
            self.in_turn([self.step_time("positions", flags, convert)], rounds=1)

    def memory(self):
        """Memory of one softmax over a large vocabulary as the number of positions grows, beside PyTorch's."""
        shape, numbers = ("small", (60, 240)) if self.quick else ("llm", (512, 1024, 2048, 4096, 8192))

        def convert(line):
            return sizes(line) | {"extra_mib": line["peak_extra_mib"]}

        for positions in numbers:
            runs = [self.step_time("memory", f"--shape {shape} --tokens {positions} --step-only", convert)]
            for implementation in ("eager", "linear-cross-entropy --chunk auto"):
                flags = f"--shape {shape} --positions {positions} --implementation {implementation} --reps 1"
                runs += self.peer("step", flags, figure="memory")
            self.in_turn(runs, rounds=1)

    def fine_tune(self):
        """A whole model with logits, with the head, with a frozen decoder and with an adapter."""
        small = "--vocab-size 600 --hidden 24 --layers 1 --inner 32 --batch 2 --positions 10"
        flags = f"--steps {2 if self.quick else 10} --json" + (f" {small}" if self.quick else "")
        command = [program("fine_tune"), *flags.split()]
        print("  " + " ".join(command), file=sys.stderr)
        found = {}
        try:
            for _ in range(1 if self.quick else 3):
                output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                for line in output.splitlines():
                    if line.startswith("{"):
                        line = json.loads(line)
                        found.setdefault(line["output"], []).append(line)
        except subprocess.CalledProcessError as error:
            return self.fail(f"fine-tune: {error}")
        for name, lines in found.items():
            run = Run([], f"cargo run --release -p lab --bin fine_tune -- {flags}", None)
            kept = ["output", "parameters", "trained", "positions", "seconds", "peak_mib"]
            shape = {"figure": "fine-tune", "shape": "a model of llama2.c's shape", "implementation": "mos-head"}
            run.lines = [shape | {key: line[key] for key in kept} for line in lines]
            self.record([run.line()])

    def outputs(self):
        """Cheaper vocabularies."""
        sampled = "--sampled 1024"
        wide = [("exact, V = 1025", "--vocab 1025", 5)]
        wide += [("sampled, S = 1024, gradient as rows", f"{sampled} --decoder-rows", 5)]
        wide += [("sampled, S = 1024, dense gradient", sampled, 5)]
        large = [(name, flags, 40) for name, flags, _ in wide]
        large += [("full softmax", "", 1), ("AdaptiveSoftmax", "--output adaptive", 9)]
        large += [("HierarchicalSoftmax, 317 classes", "--output hierarchical", 9)]
        ptb = [("a row for each id", "", 2), ("CharCnn, every row", "--output char-cnn", 2)]
        ptb += [("CharCnn, sampled, S = 1024", f"--output char-cnn {sampled}", 5)]
        shapes = [("1b", "2100 positions, K = 7, d = 900, V = 100 000", wide)]
        shapes += [("large", "840 positions, K = 1, d = 512, V = 100 000", large)]
        shapes += [("ptb", "840 positions, K = 15, d = 280, V = 10 000", ptb)]
        if self.quick:
            shapes = [("small", "256 positions, K = 4, d = 64, V = 2000", wide[:2] + ptb[:2])]
        for shape, told, rows in shapes:
            runs = []
            for implementation, flags, reps in rows:

                def convert(line, implementation=implementation, told=told):
                    memory = {"seconds": line["seconds"], "extra_mib": line["peak_extra_mib"]}
                    return {"shape": told, "implementation": implementation} | memory

                flags = f"--shape {shape} {flags} --step-only".replace("  ", " ")
                environment = {"CANDLE_BARRIER_POOL_SPIN_LIMIT": "100"}
                runs.append(self.step_time("output-step", flags, convert, (), environment, reps))
                if shape == "large" and implementation in ("AdaptiveSoftmax", "full softmax"):
                    peer, reps = ("full", 1) if implementation == "full softmax" else ("adaptive", 9)
                    runs += self.peer("adaptive", f"--implementation {peer} --reps {reps}")
            if self.quick:
                runs += self.peer("adaptive", "--implementation adaptive --reps 1 --positions 60 --vocab 1000")
            self.in_turn(runs)

    def decoding(self):
        """Token ids of a few positions."""
        seconds, rounds = (0.05, 1) if self.quick else (0.5, 2)
        small = "v10000-k1-b1/" if self.quick else "v10000-|v33278-|v128256-k(1-b1/|1-b8/|15-b1/)"
        pattern = f"(mixture/(top_k(1|10|50)|sample|ancestral|log_probs)|composed/top_k10)/({small})|/read/|/sample/ptb-"
        peers = self.peer("decoding", f"--seconds {seconds}" + (" --shapes v10000-k1-b1" if self.quick else ""))
        times, theirs = {}, {}
        for _ in range(rounds):
            try:
                for name, nanoseconds in self.criterion("decoding", pattern, seconds).items():
                    times.setdefault(name, []).append(nanoseconds / 1e6)
                for run in peers:
                    print("  " + " ".join(run.command), file=sys.stderr)
                    output = subprocess.run(run.command, stdout=subprocess.PIPE, text=True, check=True).stdout
                    for line in map(json.loads, output.splitlines()):
                        theirs.setdefault(line["shape"], []).append(line)
            except subprocess.CalledProcessError as error:
                return self.fail(f"decoding: {error}")
        times = {name: statistics.median(values) for name, values in times.items()}
        self.record(decoding_lines(times))
        for shape, lines in theirs.items():
            run = Run([], f"python benches/peers/decoding.py --shapes {shape}", None)
            run.lines = [{key: value for key, value in line.items() if key != "threads"} for line in lines]
            self.record([run.line()])

    def language_model(self):
        """Positions per second of a whole model."""
        if not self.data:
            print("language-model: left out; --data DIR is a folder with Penn Treebank", file=sys.stderr)
            return
        folder, sentences = f"{WORK}/sentences", 200 if self.quick else SENTENCES
        os.makedirs(folder, exist_ok=True)
        for name, most in (("train.txt", sentences), ("valid.txt", 100)):
            with open(f"{self.data}/{name}", encoding="utf-8") as text, open(f"{folder}/{name}", "w") as start:
                start.writelines(line for line, _ in zip(text, range(most)))
        for head in ("softmax", "mos"):
            flags = f"--head {head} --epochs 1 --json"

            def convert(output, head=head):
                vocab = re.search(r"vocabulary (\d+)", output)[1]
                [line] = json_of(output)
                return {
                    "figure": "language-model",
                    "shape": f"LSTM of 220 units, V = {vocab}",
                    "implementation": "mos-head",
                    "head": head,
                    "components": 1 if head == "softmax" else 5,
                    "vocab": int(vocab),
                    "parameters": line["parameters"],
                    "positions_per_second": line["tokens_per_second"],
                }

            told = f" # DIR: the first {sentences} sentences of Penn Treebank"
            display = f"cargo run --release -p lab --bin language_model -- --data DIR {flags}{told}"
            runs = [Run([program("language_model"), "--data", folder, *flags.split()], display, convert)]
            for compiled in ("", " --compile"):
                for run in self.peer("language_model", f"--data {folder} --head {head}{compiled}"):
                    run.display = run.display.replace(folder, "DIR") + told
                    if self.quick:
                        run.command += ["--seconds", "1", "--warmup", "1"]
                    runs.append(run)
            self.in_turn(runs)

    def confident(self):
        """Large logits and peaked priors."""
        try:
            times = self.criterion("confident", "loss_backward", 0.2 if self.quick else 3)
        except subprocess.CalledProcessError as error:
            return self.fail(f"confident: {error}")
        line = {"figure": "confident", "shape": "ptb", "positions": 84, "implementation": "mos-head"}
        for case in ("plain", "logits", "priors", "wide-priors", "confident"):
            line[case.replace("-", "_") + "_ms"] = times[f"cpu/mixture/loss_backward/{case}/f32"] / 1e6
        self.record([line | {"command": "cargo bench --bench confident"}])

    def assignment(self):
        """Words into the cells of a table."""
        if self.quick:
            print("assignment: has no small sizes, left out of --quick", file=sys.stderr)
            return
        command = ["cargo", "test", "--release", "--locked", "-p", "mos-codes", "--lib", "assignment"]
        command += ["--", "--ignored", "--nocapture"]
        print("  " + " ".join(command), file=sys.stderr)
        try:
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        except subprocess.CalledProcessError as error:
            return self.fail(f"assignment: {error}")
        self.record([line | {"command": " ".join(command)} for line in assignment_lines(output)])

    def budget(self):
        """Chunks of fewer rows."""
        shapes = [("wt2", 1050), ("llm", 2048)]
        if self.quick:
            shapes = [("small", 256)]
        for shape, positions in shapes:
            runs = []
            for rows in (480, 240, 120):

                def convert(line, rows=rows):
                    chunk = {"chunk_rows": rows, "workspace_mib": line["workspace_mib"]}
                    return sizes(line) | chunk | {"seconds": line["seconds"], "extra_mib": line["peak_extra_mib"]}

                flags = f"--shape {shape} --tokens {positions} --chunk-rows {rows} --step-only"
                runs.append(self.step_time("budget", flags, convert))
            self.in_turn(runs, rounds=2)


def main():
    legs = ["steps", "without-gradients", "dtypes", "instruction-sets", "positions", "memory", "outputs", "decoding"]
    legs += ["language-model", "fine-tune", "confident", "assignment", "budget"]
    parser = argparse.ArgumentParser(prog="scripts/measure.sh")
    parser.add_argument("legs", nargs="*", metavar="LEG", help=", ".join(legs))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--data", default=os.environ.get("MOS_HEAD_DATA"))
    for flag in ("--quick", "--ours", "--force", "--dry-run"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--python", default="python3")
    args = parser.parse_args()
    if args.check:
        return check()
    unknown = [leg for leg in args.legs if leg not in legs]
    if unknown:
        parser.error(f"no leg {', '.join(unknown)}; one of {', '.join(legs)}")
    dirty = git("status", "--porcelain", "--", *MEASURED)
    if dirty and not args.force and not args.quick:
        parser.error(f"not committed, so that no commit says what is measured (--force):\n{dirty}")
    if args.dry_run:
        return 0
    if os.getloadavg()[0] > 0.5 and not args.quick:
        print(f"This machine does something else: its load is {os.getloadavg()[0]:.1f}.", file=sys.stderr)
    build = ["cargo", "build", "--release", "--locked", "-p", "lab"]
    build += [word for name in ("step_time", "language_model", "fine_tune") for word in ("--bin", name)]
    subprocess.run(build, check=True)
    measure = Legs(args)
    for leg in args.legs or legs:
        begin = time.monotonic()
        print(f"== {leg}", file=sys.stderr)
        getattr(measure, leg.replace("-", "_"))()
        print(f"== {leg}: {(time.monotonic() - begin) / 60:.1f} minutes", file=sys.stderr)
    if measure.failed:
        print("failed:\n  " + "\n  ".join(measure.failed), file=sys.stderr)
        return 1
    if not args.quick:
        print("cargo run --release -p lab --bin figures makes the tables and pictures of them.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
