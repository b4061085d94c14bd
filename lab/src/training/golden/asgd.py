"""Golden values of averaged SGD: PyTorch's ASGD as the released code of the mixture of softmaxes calls it, with gradients
clipped by their global norm, weight decay, and a learning rate that changes before every step.

    python asgd.py > asgd.json
"""

import json

import torch

LR, CLIP, WEIGHT_DECAY, STEPS = 0.05, 0.7, 0.01, 20

torch.set_default_dtype(torch.float64)
start = [[0.5, -2.0, 3.0], [0.1, 4.0, -0.3]]
parameter = torch.nn.Parameter(torch.tensor(start))
optimizer = torch.optim.ASGD([parameter], lr=LR, t0=0, lambd=0.0, weight_decay=WEIGHT_DECAY)
steps = []
for step in range(STEPS):
    lr = LR * (0.5 + (step * 7 % 11) / 10)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    parameter.pow(4).sum().backward()
    torch.nn.utils.clip_grad_norm_([parameter], CLIP)
    optimizer.step()
    average = optimizer.state[parameter]["ax"]
    steps.append({"lr": lr, "parameter": parameter.tolist(), "average": average.tolist()})
json.dump(
    {"torch": torch.__version__, "clip": CLIP, "weight_decay": WEIGHT_DECAY, "start": start, "steps": steps},
    open(1, "w"),
    indent=1,
)
