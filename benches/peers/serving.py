"""The next token id of one text in PyTorch, with what a server asks for beside it, on the shapes of
`benches/serving.rs`: the mixture alone, without its projection.

    python benches/peers/serving.py --shapes v128256-k1-b1

Prints one JSON line for each shape: milliseconds of a sample (temperature, top-p), and of the service: penalties of
repetition, frequency and presence, bans, a sample, its log-probabilities under the model and the sampler's distribution,
the five best, and the entropy.
"""

import torch
from decoding import arguments, measure

SHAPES = [(33_278, 15, 1), (128_256, 1, 1), (128_256, 1, 8)]


def sampled(log_probs, temperature=0.8, top_p=0.95):
    """An id of the nucleus, and the logarithms of the probabilities that it was drawn from."""
    probs, ids = torch.softmax(log_probs / temperature, -1).sort(descending=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, torch.zeros_like(probs))
    place = torch.multinomial(probs, 1)
    return ids.gather(-1, place), (probs / probs.sum(-1, keepdim=True)).gather(-1, place).log()


def service(problem, history, counts):
    log_probs = problem.log_probs()
    z = log_probs.clone()
    seen = z[:, history]
    seen = torch.where(seen > 0, seen / 1.1, seen * 1.1) - 0.2 * counts - 0.1
    z[:, history] = seen
    z[:, :3] = float("-inf")
    ids, sampler_log_probs = sampled(z)
    entropy = -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)
    return ids, log_probs.gather(-1, ids), sampler_log_probs, log_probs.topk(5), entropy


def calls_of(problem):
    history = (torch.arange(1000) * 7919 % len(problem.weight)).unique()
    counts = torch.ones(len(history))
    return {
        "sample_ms": lambda: sampled(problem.log_probs()),
        "service_ms": lambda: service(problem, history, counts),
    }


if __name__ == "__main__":
    measure("serving", SHAPES, calls_of, arguments(__doc__, SHAPES))
