"""Distillation in PyTorch, on the sizes of `lab/src/bin/step_time`: the divergence of a mixture, the student, from a teacher
of the same sizes, with the gradients of contexts and decoder.

    python benches/peers/distill.py --shape llm --positions 410 --implementation chunked --divergence js

Implementations:

    composed   log-probabilities of all ids of both, in log-space, by autograd
    chunked    the formula of Liger's fused linear losses, for one softmax: for a chunk of rows at a time, the logits of both,
               the divergence and its gradient by autograd, added up (--chunk rows)

Prints one JSON line.
"""

import argparse

import torch
import torch.nn.functional as F
from record import add_arguments, emit_step, operands, start
from step import SHAPES


def log_probs(contexts, log_priors, weight):
    log_p = F.log_softmax(contexts @ weight.T, -1)
    return log_p.squeeze(1) if log_priors is None else torch.logsumexp(log_p + log_priors[..., None], 1)


def divergence(kind, log_q, log_t):
    """The sum over all rows."""
    if kind == "forward":
        return F.kl_div(log_q, log_t, reduction="sum", log_target=True)
    if kind == "reverse":
        return F.kl_div(log_t, log_q, reduction="sum", log_target=True)
    log_m = torch.logsumexp(torch.stack([log_q, log_t]) + torch.tensor(0.5).log(), 0)
    teacher_part = F.kl_div(log_m, log_t, reduction="sum", log_target=True)
    return 0.5 * (teacher_part + F.kl_div(log_m, log_q, reduction="sum", log_target=True))


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, kind, chunk):
        hidden_gradient, weight_gradient, value = torch.empty_like(hidden), torch.zeros_like(weight), 0.0

        def rows_value(h, w, teacher):
            with torch.no_grad():
                log_t = F.log_softmax(teacher @ teacher_weight.T, -1)
            return divergence(kind, F.log_softmax(h @ w.T, -1), log_t)

        for first in range(0, len(hidden), chunk):
            rows = slice(first, first + chunk)
            gradients = torch.func.grad_and_value(rows_value, argnums=(0, 1))
            (h, w), chunk_value = gradients(hidden[rows], weight, teacher_hidden[rows])
            hidden_gradient[rows] = h
            weight_gradient += w
            value += chunk_value
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return value

    @staticmethod
    def backward(ctx, upstream):
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient.mul_(upstream), weight_gradient.mul_(upstream), None, None, None, None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--implementation", choices=["composed", "chunked"], default="composed")
    parser.add_argument("--divergence", choices=["forward", "reverse", "js"], default="forward")
    parser.add_argument("--positions", type=int, help="[default: the shape's]")
    parser.add_argument("--chunk", type=int, default=128)
    add_arguments(parser)
    args = parser.parse_args()
    start(args)
    contexts, weight, log_priors = operands(args, SHAPES[args.shape])
    (positions, components, _), vocab = contexts.shape, len(weight)
    teacher = -contexts.detach()
    # The decoder of the teacher is the student's, as in `step_time`.
    teacher_weight, constant_priors = weight.detach(), None if log_priors is None else log_priors.detach()

    def step():
        contexts.grad = weight.grad = None
        if args.implementation == "chunked":
            hidden = contexts.squeeze(1)
            value = Chunked.apply(hidden, weight, teacher.squeeze(1), teacher_weight, args.divergence, args.chunk)
        else:
            with torch.no_grad():
                log_t = log_probs(teacher, constant_priors, teacher_weight)
            value = divergence(args.divergence, log_probs(contexts, log_priors, weight), log_t)
        value = value / positions
        value.backward()
        return value.detach()

    emit_step(
        step,
        args,
        figure="distill",
        shape=args.shape,
        positions=positions,
        components=components,
        vocab=vocab,
        implementation=args.implementation,
        divergence=args.divergence,
        chunk=args.chunk if args.implementation == "chunked" else None,
    )


if __name__ == "__main__":
    main()
