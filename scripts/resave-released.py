#!/usr/bin/env python3
"""Saves a model of the released code of the mixture of softmaxes (github.com/zihangdai/mos) as safetensors.

    pip install torch numpy safetensors
    python scripts/resave-released.py model.pt model.safetensors
    cargo run --release -p lab --bin language_model -- --data DIR --evaluate model.safetensors

The released code saves whole modules, with `torch.save(model)`. Their classes are not needed: modules of unknown classes
are read as plain modules with the parameters that they hold. Unpickling runs what the file says: read only files that
you trust.
"""

import argparse
import pickle
import types

import torch
from safetensors.torch import save_file


class Module(torch.nn.Module):
    """Takes the place of a class of the released code."""

    def __getattr__(self, name):
        # A weight-dropped LSTM is pickled with a bound method of its wrapper in place of flatten_parameters.
        if name == "widget_demagnetizer_y2k_edition":
            return print
        return super().__getattr__(name)


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return Module


def read(path):
    reader = types.ModuleType("reader")
    reader.Unpickler = Unpickler
    reader.load = lambda file, **options: Unpickler(file, **options).load()
    reader.__name__ = "pickle"
    return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)


def tensors(model):
    """The parameters by their names. Where a dropped recurrent weight is stored too, only the raw one is taken."""
    named = dict(model) if isinstance(model, dict) else {**model.state_dict(), **dict(model.named_parameters())}
    return {
        name: tensor.detach().float().contiguous().clone()
        for name, tensor in named.items()
        if name + "_raw" not in named
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file of torch.save(model) or torch.save(model.state_dict())")
    parser.add_argument("output", help="the safetensors file to write")
    arguments = parser.parse_args()
    found = tensors(read(arguments.model))
    if not any(name.endswith("encoder.weight") for name in found):
        parser.error(f"{arguments.model} has no encoder.weight: it holds {', '.join(sorted(found)) or 'no tensor'}")
    save_file(found, arguments.output)
    for name, tensor in sorted(found.items()):
        print(f"{name:40} {list(tensor.shape)}")


if __name__ == "__main__":
    main()
