"""One training step of the output layer in PyTorch: contexts, priors, loss, and the gradients of the hidden states and
of all parameters, on the sizes and leaves of `lab/src/bin/step_time`.

    python benches/peers/step.py --shape ptb --implementation eager

Implementations:

    eager                  one softmax: linear and cross_entropy. A mixture: the formula of the released code, the
                           logarithm of sum_k pi_k softmax_k + 1e-8
    log-space              a mixture by log_softmax and logsumexp, which needs no floor
    compile                `log-space` (one softmax: `eager`) under torch.compile
    linear-cross-entropy   one softmax: torch.nn.functional.linear_cross_entropy, with --chunk
    products               the three matrix products alone, into memory that is allocated and touched before

Prints one JSON line. One process measures one implementation, so that the peak of its memory is its own.
"""

import argparse

import torch
import torch.nn.functional as F
from record import Peak, add_arguments, emit, library, median, start, timed

# (positions, K, d, vocab, hidden), as in the lab's step_time.
SHAPES = {
    "ptb": (840, 15, 280, 10_000, 620),
    "wt2": (1050, 15, 300, 33_278, 650),
    "1b": (2100, 7, 900, 100_000, 1024),
    "llm": (2048, 1, 2048, 128_256, 2048),
    "small": (256, 4, 64, 2000, 96),
    "small-softmax": (256, 1, 64, 2000, 64),
}
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="eager")
    parser.add_argument("--positions", type=int, help="[default: the shape's]")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--chunk",
        default="auto",
        help="rows of a chunk of linear_cross_entropy: a number; auto, as LinearCrossEntropyOptions() chooses; none, "
        "its reference path without chunks (options=None)",
    )
    parser.add_argument("--forward-only", action="store_true", help="the loss without gradients")
    add_arguments(parser)
    return parser.parse_args()


class Leaves:
    """The leaves of the computation, with the scales of the lab's step_time."""

    def __init__(self, sizes, dtype, device):
        positions, components, context, vocab, hidden = sizes

        def leaf(*shape, scale):
            return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()

        self.components = components
        self.hidden = leaf(positions, hidden, scale=1.0)
        self.weight = leaf(vocab, context, scale=0.06)
        self.all = [self.hidden, self.weight]
        if components > 1:
            self.prior_weight = leaf(components, hidden, scale=0.05)
            self.latent_weight = leaf(components * context, hidden, scale=0.05)
            self.latent_bias = leaf(components * context, scale=0.05)
            self.bias = leaf(vocab, scale=0.01)
            self.all += [self.prior_weight, self.latent_weight, self.latent_bias, self.bias]
        self.targets = torch.arange(positions, device=device) * 7919 % vocab

    def contexts(self):
        """The contexts [positions, K, d] of a mixture."""
        contexts = torch.tanh(F.linear(self.hidden, self.latent_weight, self.latent_bias))
        return contexts.view(len(self.targets), self.components, -1)


def eager(leaves):
    if leaves.components == 1:
        return F.cross_entropy(F.linear(leaves.hidden, leaves.weight), leaves.targets)
    priors = F.softmax(F.linear(leaves.hidden, leaves.prior_weight), -1)
    softmaxes = F.softmax(F.linear(leaves.contexts(), leaves.weight, leaves.bias), -1)
    probs = (softmaxes * priors.unsqueeze(2)).sum(1)
    return F.nll_loss(torch.log(probs + 1e-8), leaves.targets)


def log_space(leaves):
    if leaves.components == 1:
        return eager(leaves)
    log_priors = F.log_softmax(F.linear(leaves.hidden, leaves.prior_weight), -1)
    log_softmaxes = F.log_softmax(F.linear(leaves.contexts(), leaves.weight, leaves.bias), -1)
    target_ids = leaves.targets.view(-1, 1, 1).expand(-1, leaves.components, 1)
    return -torch.logsumexp(log_priors + log_softmaxes.gather(2, target_ids).squeeze(2), -1).mean()


class LinearCrossEntropy:
    """PyTorch's fused operation, with options that are stated."""

    def __init__(self, chunk, sizes, dtype, device):
        positions, components, context, vocab, _ = sizes
        if components > 1:
            raise SystemExit("linear-cross-entropy: only for one softmax")
        if chunk == "none":
            self.options, self.chunk, self.statement, self.label = None, None, "options=None", "without chunks"
            return
        rows = None if chunk == "auto" else int(chunk)
        self.options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        # What the operation itself does with its options, to state the size of the chunks.
        resolved = self.options._adjust(positions, context, vocab, dtype, device)
        self.chunk = resolved.batch_chunk_size
        self.statement = f"batch_chunk_size={rows}, chunks of {self.chunk} rows, acc_policy={resolved.acc_policy}"
        self.label = f"{'auto: ' if rows is None else ''}chunks of {self.chunk}"

    def __call__(self, leaves):
        return F.linear_cross_entropy(leaves.hidden, leaves.weight, leaves.targets, options=self.options)


class Products:
    """Logits, gradient of the contexts and gradient of the decoder: the products that any exact method needs.

    All results have memory of their own, which was written before: an operator `@` would allocate a gradient of the
    decoder anew, and with pages of 4 KiB the system takes as long to provide a gigabyte as two of the products take at
    128 positions. The first chunk writes the decoder's gradient, the others add to it, without another pass.
    """

    def __init__(self, sizes, dtype, device):
        positions, components, context, vocab, _ = sizes
        self.rows = positions * components
        self.contexts = torch.full((self.rows, context), 0.25, dtype=dtype, device=device)
        self.weight = torch.full((vocab, context), 0.125, dtype=dtype, device=device)
        self.candidates = sorted({min(rows, self.rows) for rows in (512, 1024, 2048)})
        self.logits = torch.zeros(self.candidates[-1], vocab, dtype=dtype, device=device)
        self.context_gradient = torch.zeros_like(self.contexts)
        self.weight_gradient = torch.zeros_like(self.weight)

    def run(self, chunk, gradients=True, rows=None):
        for first in range(0, rows or self.rows, chunk):
            contexts = self.contexts[first : first + chunk]
            logits = self.logits[: len(contexts)]
            torch.mm(contexts, self.weight.t(), out=logits)
            if gradients:
                torch.mm(logits, self.weight, out=self.context_gradient[first : first + chunk])
                if first == 0:
                    torch.mm(logits.t(), contexts, out=self.weight_gradient)
                else:
                    self.weight_gradient.addmm_(logits.t(), contexts)

    def best_chunk(self, device):
        """The candidate that takes the least time per row."""

        def seconds(chunk):
            rows = self.candidates[-1] // chunk * chunk
            return timed(lambda: self.run(chunk, rows=rows), 1, 0, device)[0] / rows

        # The first product of a process takes longer.
        self.run(self.candidates[0], rows=1)
        return min(self.candidates, key=seconds)


IMPLEMENTATIONS = {
    "eager": "PyTorch, eager",
    "log-space": "PyTorch, eager in log-space",
    "compile": "PyTorch, torch.compile",
    "linear-cross-entropy": "PyTorch, linear_cross_entropy",
    "products": "PyTorch, three products alone",
}


def objective(name, chunk, sizes, dtype, device):
    """The loss as a function of the leaves."""
    if name == "linear-cross-entropy":
        return LinearCrossEntropy(chunk, sizes, dtype, device)
    if name == "compile":
        return torch.compile(log_space, dynamic=False)
    return {"eager": eager, "log-space": log_space}[name]


def load_modules(name, sizes, dtype, device):
    """Takes a small step, because PyTorch loads modules with the first one, whose memory is not the step's."""
    small = (8, sizes[1], 4, 16, 4)
    objective(name, "auto", small, dtype, device)(Leaves(small, dtype, device)).backward()
    torch.compiler.reset()


def main():
    args = arguments()
    start(args)
    device = torch.device(args.device)
    if args.device == "cuda":
        torch.set_float32_matmul_precision("highest")
    positions, components, context, vocab, hidden = SHAPES[args.shape]
    positions = args.positions or positions
    sizes, dtype = (positions, components, context, vocab, hidden), DTYPES[args.dtype]
    implementation, options, chunk, loss = IMPLEMENTATIONS[args.implementation], None, None, None
    if args.implementation == "products" and args.forward_only:
        implementation = "PyTorch, one product alone"

    if args.implementation == "products":
        base = Peak(device)
        products = Products(sizes, dtype, device)
        chunk = products.best_chunk(device)
        seconds = timed(lambda: products.run(chunk, not args.forward_only), args.reps, args.warmup, device)
        # Nothing beyond the operands counts as a step's memory: all of it is allocated before.
        extra_mib = base.extra_mib() - sum(x.nbytes for x in (products.contexts, products.weight)) / 2**20
    else:
        load_modules(args.implementation, sizes, dtype, device)
        leaves = Leaves(sizes, dtype, device)
        loss_function = objective(args.implementation, args.chunk, sizes, dtype, device)
        if args.implementation == "linear-cross-entropy":
            options, chunk = loss_function.statement, loss_function.chunk
            implementation += f" ({loss_function.label})"
        value = None

        def step():
            nonlocal value
            for leaf in leaves.all:
                leaf.grad = None
            with torch.set_grad_enabled(not args.forward_only):
                value = loss_function(leaves)
            if not args.forward_only:
                value.backward()
            value = value.detach()

        base = Peak(device)
        seconds = timed(step, args.reps, args.warmup, device)
        extra_mib, loss = base.extra_mib(), round(float(value), 6)

    emit(
        figure="without-gradients" if args.forward_only else "step",
        shape=args.shape,
        positions=positions,
        components=components,
        context=context,
        vocab=vocab,
        implementation=implementation,
        library=library(),
        dtype=None if args.dtype == "f32" else args.dtype,
        options=options,
        chunk=chunk,
        seconds=round(median(seconds), 6),
        extra_mib=round(extra_mib, 1),
        loss=loss,
    )


if __name__ == "__main__":
    main()
