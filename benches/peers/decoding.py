"""Token ids chosen at a few positions at a time in PyTorch, on the shapes of `benches/decoding.rs`: the mixture alone,
without its projection.

    python benches/peers/decoding.py                           # all shapes
    python benches/peers/decoding.py --shapes v10000-k15-b1

Prints one JSON line for each shape: milliseconds of the most probable 1, 10 and 50 ids, of a sample, and of all
log-probabilities.
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from record import add_arguments, emit, library, median, start

WIDTHS = {10_000: 280, 33_278: 300, 128_256: 1024}
SHAPES = [(vocab, k, batch) for vocab in (10_000, 33_278) for k in (1, 15) for batch in (1, 8, 32)]
SHAPES += [(128_256, 1, 1), (128_256, 1, 8), (128_256, 15, 1)]


def name(shape):
    return "v{}-k{}-b{}".format(*shape)


def arguments(description, shapes):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[name(shape) for shape in shapes], metavar="SHAPE")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure, at least --reps calls")
    add_arguments(parser, reps=10, warmup=2)
    return parser.parse_args()


class Problem:
    def __init__(self, vocab, components, batch):
        width = WIDTHS[vocab]
        self.contexts = torch.randn(batch * components, width)
        self.priors = F.softmax(torch.randn(batch, 1, components), -1)
        self.weight = (torch.rand(vocab, width) * 2 - 1) * 3 / math.sqrt(width)

    def probs(self):
        """The probabilities [batch, vocab]; the softmaxes are added up by a product with the priors."""
        softmaxes = F.softmax(F.linear(self.contexts, self.weight), -1)
        if self.priors.shape[2] == 1:
            return softmaxes
        return torch.bmm(self.priors, softmaxes.view(len(self.priors), -1, softmaxes.shape[1])).squeeze(1)

    def log_probs(self):
        if self.priors.shape[2] == 1:
            return F.log_softmax(F.linear(self.contexts, self.weight), -1)
        return self.probs().log()

    def top_k(self, k):
        probs, ids = self.probs().topk(k)
        return ids, probs.log()

    def sample(self):
        return torch.multinomial(self.probs(), 1)


def milliseconds(call, args):
    for _ in range(args.warmup):
        call()
    seconds, begin = [], time.perf_counter()
    while len(seconds) < args.reps or time.perf_counter() - begin < args.seconds:
        start_of_call = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_of_call)
    return round(1e3 * median(seconds), 4)


def calls_of(problem):
    calls = {f"top_{k}_ms": lambda k=k: problem.top_k(k) for k in (1, 10, 50)}
    return calls | {"sample_ms": problem.sample, "log_probs_ms": problem.log_probs}


def measure(figure, shapes, calls_of, args):
    """Prints the milliseconds of the calls of each shape that is asked for."""
    start(args)
    for shape in shapes:
        if args.shapes and name(shape) not in args.shapes:
            continue
        vocab, components, batch = shape
        with torch.inference_mode():
            times = {key: milliseconds(call, args) for key, call in calls_of(Problem(*shape)).items()}
        emit(
            figure=figure,
            shape=name(shape),
            vocab=vocab,
            components=components,
            context=WIDTHS[vocab],
            positions=batch,
            implementation="PyTorch",
            library=library(),
            **times,
        )


if __name__ == "__main__":
    measure("decoding", SHAPES, calls_of, arguments(__doc__, SHAPES))
