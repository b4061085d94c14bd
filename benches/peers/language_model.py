"""Training of a whole language model in PyTorch, as `lab/src/bin/language_model` does: embedding, one LSTM, output layer, SGD with
clipping of the gradients' norm. Prints one JSON line with the positions per second.

    python benches/peers/language_model.py --data DIR --head mos --compile

DIR holds train.txt, one sentence per line. Sizes and recipe are the defaults of the lab's `language_model --data`.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from record import Peak, add_arguments, emit, library, start
from torch import nn


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--head", choices=["softmax", "moc", "mos"], default="softmax")
    parser.add_argument("--compile", action="store_true", help="the output layer under torch.compile")
    parser.add_argument("--hidden", type=int, default=220)
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--context", type=int, help="[default: for as many parameters as with a softmax]")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=30.0, help="ends an epoch that takes longer")
    add_arguments(parser, warmup=5)
    return parser.parse_args()


def read(folder):
    """Token ids in the order of their first occurrence, with the end of a sentence before the first and after each."""
    ids = {}
    with open(os.path.join(folder, "train.txt"), encoding="utf-8") as lines:
        words = [word for line in lines for word in line.split() + ["<eos>"]]
    text = [ids.setdefault(word, len(ids)) for word in words]
    return torch.tensor([ids["<eos>"]] + text), len(ids)


class Head(nn.Module):
    def __init__(self, kind, hidden, components, context, vocab):
        super().__init__()
        self.kind, self.components = kind, components
        if kind != "softmax":
            self.prior = nn.Linear(hidden, components, bias=False)
            self.latent = nn.Linear(hidden, components * context)
        self.decoder = nn.Linear(hidden if kind == "softmax" else context, vocab)

    def forward(self, hidden, targets):
        if self.kind == "softmax":
            return F.cross_entropy(self.decoder(hidden), targets)
        contexts = torch.tanh(self.latent(hidden)).view(len(targets), self.components, -1)
        log_priors = F.log_softmax(self.prior(hidden), -1)
        if self.kind == "moc":
            return F.cross_entropy(self.decoder((log_priors.exp().unsqueeze(2) * contexts).sum(1)), targets)
        log_softmaxes = F.log_softmax(self.decoder(contexts), -1)
        target_ids = targets.view(-1, 1, 1).expand(-1, self.components, 1)
        return -torch.logsumexp(log_priors + log_softmaxes.gather(2, target_ids).squeeze(2), -1).mean()


def equal_context(hidden, components, vocab):
    """The size of contexts for which a mixture has as many parameters as the softmax."""
    softmax = vocab * (hidden + 1)

    def parameters(context):
        return hidden * components + (hidden + 1) * components * context + vocab * (context + 1)

    return min(range(1, 2 * hidden), key=lambda context: abs(parameters(context) - softmax))


def main():
    args = arguments()
    start(args)
    text, vocab = read(args.data)
    context = args.context or equal_context(args.hidden, args.components, vocab)
    embedding = nn.Embedding(vocab, args.hidden)
    lstm = nn.LSTM(args.hidden, args.hidden, batch_first=True)
    head = Head(args.head, args.hidden, args.components, context, vocab)
    named = [pair for module in (embedding, lstm) for pair in module.named_parameters()]
    for parameter in (parameter for _, parameter in named):
        nn.init.uniform_(parameter, -(args.hidden**-0.5), args.hidden**-0.5)
    for parameter in head.parameters():
        nn.init.uniform_(parameter, -(args.hidden**-0.5), args.hidden**-0.5)
    nn.init.uniform_(embedding.weight, -0.1, 0.1)
    nn.init.uniform_(head.decoder.weight, -0.1, 0.1)
    nn.init.zeros_(head.decoder.bias)
    parameters = [*embedding.parameters(), *lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=args.lr)
    objective = torch.compile(head, dynamic=False) if args.compile else head

    length = (len(text) - 1) // args.batch
    inputs = text[: args.batch * length].view(args.batch, length)
    targets = text[1 : args.batch * length + 1].view(args.batch, length)
    base = Peak()
    state, losses, seconds, begin = None, [], 0.0, time.perf_counter()
    for first in range(0, length - args.bptt + 1, args.bptt):
        step = time.perf_counter()
        hidden, state = lstm(embedding(inputs[:, first : first + args.bptt]), state)
        state = tuple(part.detach() for part in state)
        loss = objective(hidden.reshape(-1, args.hidden), targets[:, first : first + args.bptt].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) > args.warmup:
            seconds += time.perf_counter() - step
        if len(losses) > args.warmup + 2 and time.perf_counter() - begin > args.seconds:
            break
    timed = len(losses) - args.warmup
    if timed < 1:
        raise SystemExit(f"{args.data}: too short for {args.warmup} steps before the timed ones")
    emit(
        figure="language-model",
        shape=f"LSTM of {args.hidden} units, V = {vocab}",
        head=args.head,
        components=1 if args.head == "softmax" else args.components,
        vocab=vocab,
        implementation="PyTorch, torch.compile" if args.compile else "PyTorch, eager",
        library=library(),
        parameters=sum(parameter.numel() for parameter in parameters),
        steps=timed,
        positions_per_second=round(timed * args.batch * args.bptt / seconds, 1),
        extra_mib=round(base.extra_mib(), 1),
        loss=round(sum(losses[-20:]) / len(losses[-20:]), 4),
    )


if __name__ == "__main__":
    main()
