"""What the programs of this folder share: threads, timing, peak memory, and the JSON line of a measurement."""

import ctypes
import gc
import json
import os
import statistics
import time

import torch


def add_arguments(parser, reps=3, warmup=1):
    """The flags that every program has."""
    parser.add_argument("--reps", type=int, default=reps, help="timed runs")
    parser.add_argument("--warmup", type=int, default=warmup, help="runs before the timed ones")
    parser.add_argument("--threads", type=int, default=default_threads(), help="threads of PyTorch")


def start(arguments):
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)


def operands(args, shape):
    """Random contexts [positions, K, d], a weight [vocab, d] and, for several components, log-priors, all with gradients."""
    positions, components, d, vocab, _ = shape
    positions = args.positions or positions
    if args.implementation == "chunked" and components > 1:
        raise SystemExit("chunked: only for one softmax")
    contexts = torch.randn(positions, components, d).requires_grad_()
    weight = (torch.randn(vocab, d) * 0.06).requires_grad_()
    log_priors = None if components == 1 else torch.randn(positions, components).log_softmax(-1).requires_grad_()
    return contexts, weight, log_priors


def default_threads():
    """As many as this crate uses."""
    return int(os.environ.get("RAYON_NUM_THREADS") or len(os.sched_getaffinity(0)))


def library():
    """The version, as the tables name it."""
    return "PyTorch " + torch.__version__.split("+")[0]


def status(name):
    """Bytes of a line of this process's status, on Linux."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Peak:
    """Watches the memory that is in use at most: that of the process, or of the allocator on a GPU."""

    def __init__(self, device=torch.device("cpu")):
        self.cuda = device.type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return
        # What the allocator holds without need would hide a part of the peak.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        self.start = status("VmRSS")

    def extra_mib(self):
        """How far the peak is above the start, in MiB."""
        peak = torch.cuda.max_memory_allocated() if self.cuda else status("VmHWM")
        return (peak - self.start) / 2**20


def timed(run, reps, warmup, device=torch.device("cpu")):
    """The sorted seconds of `reps` calls, after `warmup` others."""
    seconds = []
    for rep in range(warmup + reps):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if rep >= warmup:
            seconds.append(time.perf_counter() - begin)
    return sorted(seconds)


def median(seconds):
    return statistics.median(seconds)


def emit(**line):
    """Prints a measurement without the keys that are None."""
    line["threads"] = torch.get_num_threads()
    print(json.dumps({key: value for key, value in line.items() if value is not None}), flush=True)


def emit_step(step, args, **line):
    """Prints seconds and peak memory of a step on the CPU."""
    base = Peak()
    seconds = timed(step, args.reps, args.warmup)
    line |= {"library": library(), "seconds": round(median(seconds), 6), "extra_mib": round(base.extra_mib(), 1)}
    emit(**line)
