"""Tiny models of the architecture that was released with the mixture of softmaxes (github.com/zihangdai/mos), with
random parameters: their checkpoints under the released names, and the negative log-likelihood of every target of a
short text, with the released floor of 1e-8 and without it.

    python released.py          # torch, numpy, safetensors; writes golden.json and the .safetensors files beside it
"""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
SENTENCES = ["the cat sat on the mat", "a dog ate the cat", "on a mat the dog sat", "the the the mat"]
FLOOR = 1e-8


class WeightDrop(torch.nn.Module):
    """An LSTM whose recurrent weight is kept under another name, from which a dropped one is made."""

    def __init__(self, lstm):
        super().__init__()
        raw = lstm.weight_hh_l0
        del lstm._parameters["weight_hh_l0"]
        lstm.register_parameter("weight_hh_l0_raw", torch.nn.Parameter(raw.data))
        self.module = lstm


class Model(torch.nn.Module):
    def __init__(self, vocab, embedding, inner, hidden, layers, components, tied, weight_dropout):
        super().__init__()
        self.encoder = torch.nn.Embedding(vocab, embedding)
        units = [inner] * (layers - 1) + [hidden]
        lstms = [torch.nn.LSTM(i, o) for i, o in zip([embedding] + units[:-1], units)]
        self.rnns = torch.nn.ModuleList([WeightDrop(lstm) for lstm in lstms] if weight_dropout else lstms)
        width = embedding if components else hidden
        if components:
            self.prior = torch.nn.Linear(hidden, components, bias=False)
            self.latent = torch.nn.Sequential(torch.nn.Linear(hidden, components * width), torch.nn.Tanh())
        self.decoder = torch.nn.Linear(width, vocab)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.components = components

    def nll(self, ids, floor):
        """The equations of the paper, step by step, in f64."""
        x = self.encoder.weight[ids[:-1]]
        for lstm in self.rnns:
            lstm = getattr(lstm, "module", lstm)
            recurrent = getattr(lstm, "weight_hh_l0_raw", None)
            recurrent = lstm.weight_hh_l0 if recurrent is None else recurrent
            h = c = torch.zeros(recurrent.shape[1])
            outputs = []
            for step in x:
                gates = lstm.weight_ih_l0 @ step + lstm.bias_ih_l0 + recurrent @ h + lstm.bias_hh_l0
                i, f, g, o = gates.chunk(4)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outputs.append(h)
            x = torch.stack(outputs)
        if self.components:
            priors = F.softmax(self.prior(x), -1)
            contexts = self.latent(x).view(len(x), self.components, -1)
        else:
            priors, contexts = torch.ones(len(x), 1), x.unsqueeze(1)
        probabilities = (priors.unsqueeze(-1) * F.softmax(self.decoder(contexts), -1)).sum(1)
        return -torch.log(probabilities.gather(1, ids[1:].unsqueeze(1)).squeeze(1) + floor)


torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
words = {}
ids = [words.setdefault(word, len(words)) for line in SENTENCES for word in line.split() + ["<eos>"]]
ids = torch.tensor([words["<eos>"]] + ids)
V = len(words)
models = {
    "tied": (Model(V, 6, 8, 7, 3, 4, True, True), ""),
    "untied": (Model(V, 6, 8, 7, 2, 3, False, False), "module."),
    "softmax": (Model(V, 6, 8, 6, 2, 0, True, True), ""),
}
golden = {"torch": torch.__version__, "sentences": SENTENCES, "floor": FLOOR}
for name, (model, prefix) in models.items():
    with torch.no_grad():
        for parameter in model.parameters():
            # Values of f32, large enough for some targets to be improbable.
            parameter.copy_((parameter * 5).float().double())
        golden[name] = {"nll": model.nll(ids, 0.0).tolist(), "with_floor": model.nll(ids, FLOOR).tolist()}
        # state_dict has both names of a tied matrix; copies, since safetensors refuses shared memory.
        tensors = {prefix + key: value.float().contiguous().clone() for key, value in model.state_dict().items()}
    if name == "tied":
        # As after an evaluation in PyTorch 1.0 and later: the dropped weight is a parameter too, and not the one to read.
        tensors["rnns.0.module.weight_hh_l0"] = torch.zeros_like(tensors["rnns.0.module.weight_hh_l0_raw"])
    save_file(tensors, os.path.join(HERE, f"{name}.safetensors"))
with open(os.path.join(HERE, "golden.json"), "w") as file:
    json.dump(golden, file, indent=1)
