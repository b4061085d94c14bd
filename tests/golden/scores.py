"""Log-probabilities and entropies of a mixture of softmaxes, with gradients, from PyTorch in f64: scores.json.

    python3 tests/golden/scores.py
"""

import json
import os

import torch

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
POSITIONS, COMPONENTS, D, VOCAB, N = 6, 3, 5, 23, 2


def scores(operands, ids, temperature, softcap):
    contexts, logits, weight, bias = operands
    z = contexts @ weight.T + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.logsumexp(torch.log_softmax(z, -1) + torch.log_softmax(logits, -1)[..., None], 1)
    log_p = torch.log_softmax(log_p / temperature, -1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    return log_p.gather(1, ids), entropy


def case(components, temperature, softcap):
    shapes = {
        "contexts": (POSITIONS, components, D),
        "logits": (POSITIONS, components),
        "weight": (VOCAB, D),
        "bias": (VOCAB,),
    }
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes.values()]
    ids = torch.randint(0, VOCAB, (POSITIONS, N))
    upstream = torch.randn(POSITIONS, N + 1)
    log_prob, entropy = scores(operands, ids, temperature, softcap)
    ((log_prob * upstream[:, :N]).sum() + (entropy * upstream[:, N]).sum()).backward()
    flat = lambda tensor: tensor.detach().flatten().tolist()
    return {
        "components": components,
        "temperature": temperature,
        "softcap": softcap,
        "operands": {name: flat(x) for name, x in zip(shapes, operands)},
        "token_ids": flat(ids),
        "upstream": flat(upstream),
        "log_prob": flat(log_prob),
        "entropy": flat(entropy),
        "gradients": {name: flat(x.grad) for name, x in zip(shapes, operands)},
    }


cases = [case(*c) for c in [(1, 1.0, None), (3, 1.0, None), (3, 0.7, None), (3, 1.0, 2.0), (1, 1.8, 2.0)]]
golden = {"positions": POSITIONS, "d": D, "vocab": VOCAB, "n": N, "torch": torch.__version__, "cases": cases}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "scores.json"), "w") as file:
    json.dump(golden, file)
    file.write("\n")
