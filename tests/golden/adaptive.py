"""Golden values of torch.nn.AdaptiveLogSoftmaxWithLoss in float64: log-probabilities, losses and every gradient.

    python adaptive.py > adaptive.json

9 // 1.8 is 4, since 1.8 in binary is larger, although 9 / 1.8 rounds to 5: the sizes follow Python's floor division.
"""

import json
import sys

import torch

SEED = 20170611
VOCAB, CUTOFFS, ROWS = 20, [5, 11], 9
CASES = [
    dict(hidden=12, div_value=2.0, head_bias=False),
    dict(hidden=9, div_value=1.8, head_bias=True),
    dict(hidden=16, div_value=4.0, head_bias=True),
]


def tensor(tensor):
    return dict(shape=list(tensor.shape), values=tensor.detach().reshape(-1).tolist())


def case(hidden, div_value, head_bias):
    head = torch.nn.AdaptiveLogSoftmaxWithLoss(hidden, VOCAB, CUTOFFS, div_value, head_bias).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(2 * torch.rand_like(parameter) - 1)
    states = (3 * torch.rand(ROWS, hidden, dtype=torch.float64) - 1.5).requires_grad_()
    targets = torch.tensor([0, 4, 5, 10, 11, 19, 2, 7, 15])
    output, loss = head(states, targets)
    loss.backward()
    gradients = {name: tensor(parameter.grad) for name, parameter in head.named_parameters()}
    return dict(
        hidden=hidden,
        div_value=div_value,
        head_bias=head_bias,
        state_dict={name: tensor(parameter) for name, parameter in head.state_dict().items()},
        states=tensor(states),
        targets=targets.tolist(),
        log_probs=tensor(head.log_prob(states)),
        output=tensor(output),
        loss=loss.item(),
        gradients={**gradients, "states": tensor(states.grad)},
        argmax=head.predict(states).tolist(),
    )


torch.manual_seed(SEED)
json.dump(dict(vocab=VOCAB, cutoffs=CUTOFFS, cases=[case(**options) for options in CASES]), sys.stdout, indent=1)
