"""Log-probabilities and entropies in PyTorch, with gradients of both, on the sizes of `lab/src/bin/step_time`: the mixture
alone, from contexts and log-priors.

    python benches/peers/scores.py --shape llm --positions 410 --implementation chunked

Implementations:

    composed   log-probabilities of all ids, in log-space, by autograd
    chunked    the formula of TRL's chunked log-probability and entropy, for one softmax: a chunk of logits at a time, which
               the backward pass computes again (--chunk rows)

--values computes no gradients. Prints one JSON line.
"""

import argparse

import torch
import torch.nn.functional as F
from record import add_arguments, emit_step, operands, start
from step import SHAPES


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        log_prob, entropy = [], []
        for h, y in zip(hidden.split(chunk), targets.split(chunk)):
            log_p = F.log_softmax(h @ weight.T, -1)
            log_prob.append(log_p.gather(1, y[:, None]).squeeze(1))
            entropy.append(-(log_p.exp() * log_p).sum(-1))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        return torch.cat(log_prob), torch.cat(entropy)

    @staticmethod
    def backward(ctx, log_prob_gradient, entropy_gradient):
        hidden, weight, targets = ctx.saved_tensors
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(targets), ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            log_p = F.log_softmax(hidden[rows] @ weight.T, -1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1, keepdim=True)
            logits_gradient = -p * (log_prob_gradient[rows, None] + entropy_gradient[rows, None] * (log_p + entropy))
            logits_gradient.scatter_add_(1, targets[rows, None], log_prob_gradient[rows, None])
            hidden_gradient[rows] = logits_gradient @ weight
            weight_gradient.addmm_(logits_gradient.T, hidden[rows])
        return hidden_gradient, weight_gradient, None, None


def composed(contexts, log_priors, weight, targets):
    log_p = F.log_softmax(contexts @ weight.T, -1)
    log_p = log_p.squeeze(1) if log_priors is None else torch.logsumexp(log_p + log_priors[..., None], 1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--implementation", choices=["composed", "chunked"], default="composed")
    parser.add_argument("--positions", type=int, help="[default: the shape's]")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--values", action="store_true", help="without gradients")
    add_arguments(parser)
    args = parser.parse_args()
    start(args)
    contexts, weight, log_priors = operands(args, SHAPES[args.shape])
    (positions, components, _), vocab = contexts.shape, len(weight)
    targets = torch.arange(positions) * 7919 % vocab

    def scores():
        if args.implementation == "chunked":
            return Chunked.apply(contexts.squeeze(1), weight, targets, args.chunk)
        return composed(contexts, log_priors, weight, targets)

    def step():
        if args.values:
            with torch.no_grad():
                log_prob, entropy = scores()
            return (log_prob + entropy).mean()
        contexts.grad = weight.grad = None
        log_prob, entropy = scores()
        value = (log_prob + 0.1 * entropy).mean()
        value.backward()
        return value.detach()

    emit_step(
        step,
        args,
        figure="scores",
        shape=args.shape,
        positions=positions,
        components=components,
        vocab=vocab,
        implementation=args.implementation,
        gradients=not args.values,
        chunk=args.chunk if args.implementation == "chunked" else None,
    )


if __name__ == "__main__":
    main()
