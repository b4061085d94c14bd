"""Golden values from PyTorch in float64: losses, log-probabilities and gradients of the three heads.

    python golden.py > golden.json

The formulas are written out here with ordinary PyTorch operations. The losses of the softmax head are those of
torch.nn.functional.cross_entropy itself, so that its conventions for label smoothing, class weights and ignored targets are
what the crate is measured against. `released` is the released code's output layer, log(sum_k pi_k softmax_k + 1e-8).
"""

import json
import sys

import torch
import torch.nn.functional as F

SEED = 20180430
HIDDEN, CONTEXT, COMPONENTS, VOCAB, ROWS = 5, 4, 3, 11, 6
IGNORED = -100
EPSILON = 1e-8

OPTIONS = [
    dict(reduction="mean"),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(reduction="mean", ignore_index=IGNORED),
    dict(reduction="mean", label_smoothing=0.1),
    dict(reduction="mean", class_weights=True),
    dict(reduction="mean", ignore_index=IGNORED, label_smoothing=0.2, class_weights=True),
    dict(reduction="none", ignore_index=IGNORED, label_smoothing=0.2, class_weights=True),
]
# Beyond cross_entropy; the softmax head has no oracle of PyTorch's own for these.
MORE = [
    dict(reduction="sum", z_loss=0.05),
    dict(reduction="mean", softcap=1.5),
    dict(reduction="mean", position_weights=True, class_weights=True),
    dict(
        reduction="mean", ignore_index=IGNORED, label_smoothing=0.2, class_weights=True, position_weights=True, z_loss=0.05,
        softcap=1.5,
    ),
]


def operands(head, generator):
    """Every operand of a head, in the shapes that the crate documents."""

    def uniform(*shape, spread=1.0):
        values = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return ((2 * values - 1) * spread).requires_grad_()

    width = HIDDEN if head == "softmax" else CONTEXT
    tensors = {"hidden": uniform(ROWS, HIDDEN, spread=2.0)}
    if head != "softmax":
        tensors["prior.weight"] = uniform(COMPONENTS, HIDDEN)
        tensors["prior.bias"] = uniform(COMPONENTS)
        tensors["latent.weight"] = uniform(COMPONENTS * CONTEXT, HIDDEN)
        tensors["latent.bias"] = uniform(COMPONENTS * CONTEXT)
    tensors["decoder.weight"] = uniform(VOCAB, width, spread=2.0)
    tensors["decoder.bias"] = uniform(VOCAB, spread=2.0)
    return tensors


def project(head, t):
    """Contexts [rows, K, d] and log-priors [rows, K] of the mixture that a head stands for."""
    hidden = t["hidden"]
    if head == "softmax":
        return hidden.unsqueeze(1), torch.zeros(ROWS, 1, dtype=torch.float64)
    log_priors = F.log_softmax(F.linear(hidden, t["prior.weight"], t["prior.bias"]), -1)
    contexts = torch.tanh(F.linear(hidden, t["latent.weight"], t["latent.bias"])).view(ROWS, COMPONENTS, CONTEXT)
    if head == "mos":
        return contexts, log_priors
    mixed = (log_priors.exp().unsqueeze(-1) * contexts).sum(1, keepdim=True)
    return mixed, torch.zeros(ROWS, 1, dtype=torch.float64)


def logits_of(head, t, softcap=None):
    contexts, log_priors = project(head, t)
    logits = F.linear(contexts, t["decoder.weight"], t["decoder.bias"])
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)), log_priors


def log_probs_of(head, t, softcap=None):
    logits, log_priors = logits_of(head, t, softcap)
    return torch.logsumexp(log_priors.unsqueeze(-1) + F.log_softmax(logits, -1), 1)


def reduce(each, reduction, count):
    return {"none": each, "sum": each.sum(), "mean": each.sum() / count}[reduction]


def mixture_loss(head, t, targets, options, position_weights, class_weights):
    """The crate's objective, from the mixture's log-probabilities."""
    log_probs = log_probs_of(head, t, options.get("softcap"))
    logits, _ = logits_of(head, t, options.get("softcap"))
    counted = targets != options.get("ignore_index", VOCAB)
    words = torch.where(counted, targets, 0)
    smoothing = options.get("label_smoothing", 0.0)
    mass = torch.full_like(log_probs, smoothing / VOCAB)
    mass.scatter_add_(1, words.unsqueeze(1), torch.full((ROWS, 1), 1 - smoothing, dtype=torch.float64))
    classes = class_weights if options.get("class_weights") else torch.ones(VOCAB, dtype=torch.float64)
    tokens = position_weights if options.get("position_weights") else torch.ones(ROWS, dtype=torch.float64)
    each = -(mass * classes * log_probs).sum(1)
    each = each + options.get("z_loss", 0.0) * torch.logsumexp(logits, -1).square().mean(1)
    tokens = tokens * counted
    return reduce(each * tokens, options["reduction"], (tokens * classes[words]).sum())


def cross_entropy(t, targets, options, class_weights):
    logits = F.linear(t["hidden"], t["decoder.weight"], t["decoder.bias"])
    return F.cross_entropy(
        logits,
        targets,
        weight=class_weights if options.get("class_weights") else None,
        ignore_index=options.get("ignore_index", IGNORED),
        reduction=options["reduction"],
        label_smoothing=options.get("label_smoothing", 0.0),
    )


def released(t, targets):
    """Log-probabilities and mean loss of the released code, which adds 1e-8 to every probability."""
    contexts, log_priors = project("mos", t)
    softmaxes = F.softmax(F.linear(contexts, t["decoder.weight"], t["decoder.bias"]), -1)
    log_probs = torch.log((log_priors.exp().unsqueeze(-1) * softmaxes).sum(1) + EPSILON)
    return log_probs, F.nll_loss(log_probs, targets)


def flat(tensor):
    return tensor.detach().reshape(-1).tolist()


def gradients(value, t, upstream):
    value = value if value.dim() == 0 else (value * upstream).sum()
    found = torch.autograd.grad(value, list(t.values()))
    return {name: flat(g) for name, g in zip(t, found)}


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(SEED)
    position_weights = torch.randint(8, 129, (ROWS,), generator=generator).double() / 64
    class_weights = torch.randint(8, 129, (VOCAB,), generator=generator).double() / 64
    upstream = torch.randint(-64, 65, (ROWS,), generator=generator).double() / 32
    heads = {}
    for head in ["softmax", "moc", "mos"]:
        t = operands(head, generator)
        targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
        log_probs = log_probs_of(head, t)
        losses = []
        for options in OPTIONS + MORE:
            marked = targets.clone()
            if "ignore_index" in options:
                marked[1], marked[4] = IGNORED, IGNORED
            value = mixture_loss(head, t, marked, options, position_weights, class_weights)
            if head == "softmax" and options in OPTIONS:
                ours, value = value, cross_entropy(t, marked, options, class_weights)
                assert torch.allclose(ours, value, rtol=1e-13, atol=1e-13), options
            losses.append(
                dict(
                    options=options,
                    targets=marked.tolist(),
                    value=flat(value),
                    gradients=gradients(value, t, upstream),
                )
            )
        heads[head] = dict(
            operands={name: flat(tensor) for name, tensor in t.items()},
            targets=targets.tolist(),
            log_probs=flat(log_probs),
            nll=flat(F.nll_loss(log_probs, targets, reduction="none")),
            losses=losses,
        )
        if head == "mos":
            # A target that is nearly impossible, so that the epsilon is felt.
            with torch.no_grad():
                t["decoder.bias"][targets[0]] = -17.0
            log_probs, value = released(t, targets)
            heads["released"] = dict(
                operands={name: flat(tensor) for name, tensor in t.items()},
                targets=targets.tolist(),
                log_probs=flat(log_probs),
                value=flat(value),
                gradients=gradients(value, t, upstream),
            )
    text = json.dumps(
        dict(
            torch=torch.__version__,
            seed=SEED,
            sizes=dict(hidden=HIDDEN, context=CONTEXT, components=COMPONENTS, vocab=VOCAB, rows=ROWS),
            epsilon=EPSILON,
            position_weights=flat(position_weights),
            class_weights=flat(class_weights),
            upstream=flat(upstream),
            heads=heads,
        ),
    )
    # A line for each loss.
    sys.stdout.write(text.replace('{"options"', '\n{"options"') + "\n")


if __name__ == "__main__":
    main()
