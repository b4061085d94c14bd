"""The peers of a training step on a GPU, all in one process, since a process takes longer to start than a step to run:
the formulas of `step.py`, and for one softmax Liger's and Apple's fused losses where they are installed; the three
matrix products, together and each alone. A JSON line each, as soon as it is measured.

    python3 benches/peers/gpu_steps.py --shapes ptb,llm --seconds 90

`seconds` is the median of steps that the host waits for, as `step_time` measures them, `pipelined_seconds` the time of
a step among many that it does not wait for.
"""

import argparse
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from record import Peak, emit, library, median, timed
from step import DTYPES, SHAPES, Leaves, eager, log_space

DEVICE = torch.device("cuda")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="ptb,llm,wt2", help="names of step.py, with commas")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=90, help="no measurement starts later")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--only", default="", help="measure what has this in its name")
    return parser.parse_args()


class Products:
    """The operands of the three products, with random values: a GPU multiplies constants faster."""

    def __init__(self, sizes, dtype):
        positions, components, context, vocab, _ = sizes
        rows = positions * components

        def random(*shape, scale):
            return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

        self.contexts, self.weight = random(rows, context, scale=0.5), random(vocab, context, scale=0.06)
        self.gradient = random(rows, vocab, scale=1e-3)

    def all(self):
        torch.mm(self.contexts, self.weight.t())
        torch.mm(self.gradient, self.weight)
        torch.mm(self.gradient.t(), self.contexts)

    def padded(self):
        """All three, with contexts and vocabulary padded to 16 bytes, and their sizes."""
        multiple = 16 // self.contexts.element_size()
        context, vocab = (-size % multiple for size in (self.contexts.shape[1], self.weight.shape[0]))
        contexts, weight = F.pad(self.contexts, (0, context)), F.pad(self.weight, (0, context, 0, vocab))
        gradient = F.pad(self.gradient, (0, vocab))

        def run():
            torch.mm(contexts, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), contexts)

        return weight.shape, run

    def single(self):
        """Each product alone, with results in the dtype of the operands and in f32."""
        operands = {
            "logits": (self.contexts, self.weight.t()),
            "contexts' gradient": (self.gradient, self.weight),
            "decoder's gradient": (self.gradient.t(), self.contexts),
        }
        for name, (a, b) in operands.items():
            yield f"product, {name}", partial(torch.mm, a, b)
            if a.dtype != torch.float32:
                yield f"product, {name} in f32", partial(torch.mm, a, b, out_dtype=torch.float32)


def fused_losses(leaves):
    """Fused losses of one softmax that are installed, by name."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        yield "Liger", partial(liger, leaves.weight, leaves.hidden, leaves.targets)
    except Exception as error:
        print("no Liger:", error, file=sys.stderr)
    try:
        from cut_cross_entropy import linear_cross_entropy

        for impl in ("cce_exact", "cce"):
            yield f"CCE, {impl}", partial(linear_cross_entropy, leaves.hidden, leaves.weight, leaves.targets, impl=impl)
    except Exception as error:
        print("no CCE:", error, file=sys.stderr)


def pipelined(run, reps):
    """The seconds of a run among `reps`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(reps):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / reps


def main():
    args = arguments()
    start, dtype = time.monotonic(), DTYPES[args.dtype]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")

    def measure(shape, name, run, loss=None, leaves=()):
        if args.only not in name:
            return
        # Gradients of an earlier step would count as memory that this one needs no more.
        for leaf in leaves:
            leaf.grad = None
        if time.monotonic() - start > args.seconds:
            print(f"out of time: {shape}, {name}", file=sys.stderr)
            return
        try:
            base = Peak(DEVICE)
            seconds = timed(run, args.reps, 3, DEVICE)
            extra_mib = base.extra_mib()
            emit(
                figure="step",
                shape=shape,
                implementation=name,
                library=library(),
                dtype=args.dtype,
                seconds=round(median(seconds), 7),
                pipelined_seconds=round(pipelined(run, args.reps), 7),
                extra_mib=round(extra_mib, 1),
                loss=None if loss is None else round(float(loss()), 6),
            )
        # A peer that fails does not cost the others their results.
        except Exception as error:
            print(f"failed: {shape}, {name}: {str(error)[:300]}", file=sys.stderr)
        torch.cuda.empty_cache()

    def measure_products(shape):
        products = Products(SHAPES[shape], dtype)
        measure(shape, "three products", products.all)
        sizes, run = products.padded()
        if sizes != products.weight.shape:
            measure(shape, f"three products, padded to {sizes[0]} by {sizes[1]}", run)
        for name, run in products.single():
            measure(shape, name, run)

    def measure_steps(shape):
        leaves = Leaves(SHAPES[shape], dtype, DEVICE)

        def step(loss):
            def run():
                for leaf in leaves.all:
                    leaf.grad = None
                loss().backward()

            return run

        torch.compiler.reset()
        compiled = torch.compile(log_space, dynamic=False)
        losses = {
            "eager": partial(eager, leaves),
            "eager in log-space": partial(log_space, leaves),
            "torch.compile": partial(compiled, leaves),
        }
        if leaves.components == 1:
            del losses["eager in log-space"]
            losses |= dict(fused_losses(leaves))
        for name, loss in losses.items():
            measure(shape, name, step(loss), lambda: loss().detach(), leaves.all)

    for shape in args.shapes.split(","):
        measure_products(shape)
        measure_steps(shape)


if __name__ == "__main__":
    main()
