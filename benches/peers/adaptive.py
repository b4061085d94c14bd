"""One training step over a large vocabulary in PyTorch: AdaptiveLogSoftmaxWithLoss, or a full softmax; loss and the
gradients of the hidden states and of all parameters, as the lab's `step_time --shape large` has them.

    python benches/peers/adaptive.py --implementation adaptive

Prints one JSON line.
"""

import argparse

import torch
import torch.nn.functional as F
from record import Peak, add_arguments, emit, library, median, start, timed
from torch import nn

IMPLEMENTATIONS = {"adaptive": "PyTorch, AdaptiveLogSoftmaxWithLoss", "full": "PyTorch, full softmax"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="adaptive")
    parser.add_argument("--positions", type=int, default=840)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=100_000)
    add_arguments(parser, reps=9)
    return parser.parse_args()


def zipf(positions, vocab):
    """The targets of the lab's step_time: P(id) = log((id + 2) / (id + 1)) / log(vocab + 1)."""
    quantiles = (torch.arange(positions, dtype=torch.float64) * 0.6180339887498949).frac()
    ids = torch.expm1(quantiles * torch.log1p(torch.tensor(float(vocab), dtype=torch.float64)))
    return ids.long().clamp(max=vocab - 1)


def spaced(number):
    """100000 as "100 000", as the tables of this crate have it."""
    return f"{number:,}".replace(",", " ")


def main():
    args = arguments()
    start(args)
    hidden = torch.randn(args.positions, args.hidden, requires_grad=True)
    targets = zipf(args.positions, args.vocab)
    if args.implementation == "adaptive":
        cutoffs = [args.vocab // 50, args.vocab // 10, args.vocab // 2]
        layer = nn.AdaptiveLogSoftmaxWithLoss(args.hidden, args.vocab, cutoffs)
    else:
        layer = nn.Linear(args.hidden, args.vocab, bias=False)
    loss = None

    def step():
        nonlocal loss
        hidden.grad = None
        layer.zero_grad()
        adaptive = args.implementation == "adaptive"
        loss = layer(hidden, targets).loss if adaptive else F.cross_entropy(layer(hidden), targets)
        loss.backward()
        loss = loss.detach()

    base = Peak()
    seconds = timed(step, args.reps, args.warmup)
    emit(
        figure="output-step",
        shape=f"{spaced(args.positions)} positions, K = 1, d = {args.hidden}, V = {spaced(args.vocab)}",
        implementation=IMPLEMENTATIONS[args.implementation],
        library=library(),
        seconds=round(median(seconds), 6),
        extra_mib=round(base.extra_mib(), 1),
        loss=round(float(loss), 6),
    )


if __name__ == "__main__":
    main()
