"""A word language model, an LSTM with tied weights, on the source text of Python's own library.

`python examples/word_language_model_amp.py` takes half a minute on a CPU. Truncated backpropagation through time,
gradients clipped where the optimizer sees them, and a learning rate that follows the validation loss.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_apex as apex
from lightning_apex import amp

MODULES = ("argparse", "ast", "calendar", "configparser", "datetime", "fractions", "inspect", "pathlib", "statistics")


class WordModel(nn.Module):
    """Embedding, LSTM, and a decoder that shares the embedding's weight."""

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, valid, words = corpus(options.words, options.length, device)
    model = WordModel(words, options.width, options.layers, options.dropout).to(device)
    optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=options.lr)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=options.opt_level,
        half_dtype="bfloat16" if device.type == "cpu" and options.opt_level in ("O1", "O2", "O3") else None,
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=1)
    print(f"{train.numel():,} words to learn from, {words:,} different")
    first = evaluate(model, valid, options.bptt)
    print(f"epoch 0  validation perplexity {math.exp(first):.0f}")
    loss = first
    for epoch in range(1, options.epochs + 1):
        began = time.perf_counter()
        learn(model, optimizer, train, options)
        loss = evaluate(model, valid, options.bptt)
        scheduler.step(loss)
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}  validation perplexity {math.exp(loss):.1f}  {seconds:.1f} s", flush=True)
    assert model.decoder.weight is model.encoder.weight
    return int(not math.exp(loss) < math.exp(first) / (2 if options.fast else 10))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, columns: Tensor, options: argparse.Namespace) -> None:
    model.train()
    hidden = None
    for tokens, targets in windows(columns, options.bptt):
        if hidden is not None:
            hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(tokens, hidden)
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), options.clip)
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, columns: Tensor, bptt: int) -> float:
    model.eval()
    hidden, total, count = None, 0.0, 0
    for tokens, targets in windows(columns, bptt):
        output, hidden = model(tokens, hidden)
        total += F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return total / count


def windows(columns: Tensor, bptt: int) -> Iterator[tuple[Tensor, Tensor]]:
    for i in range(0, len(columns) - 1, bptt):
        end = min(i + bptt, len(columns) - 1)
        yield columns[i:end], columns[i + 1 : end + 1]


def corpus(most: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The text as columns of words, for training (20) and validation (4), and the number of different words."""
    folder = Path(os.__file__).parent
    text = "\n".join((folder / f"{name}.py").read_text() for name in MODULES if (folder / f"{name}.py").exists())
    found = re.findall(r"[A-Za-z_]\w*|\d+|[^\w\s]|\n", text)[:length]
    known = {word: i for i, (word, _) in enumerate(Counter(found).most_common(most - 1), 1)}
    numbers = torch.tensor([known.get(word, 0) for word in found], device=device)
    blocks = numbers[: len(numbers) // 500 * 500].view(-1, 500)
    held_out = torch.arange(len(blocks), device=device) % 10 == 9  # from everywhere in the text
    return in_columns(blocks[~held_out].flatten(), 20), in_columns(blocks[held_out].flatten(), 4), len(known) + 1


def in_columns(numbers: Tensor, count: int) -> Tensor:
    return numbers[: len(numbers) // count * count].view(count, -1).t().contiguous()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bptt", type=int, default=35, help="words in a sequence")
    parser.add_argument("--words", type=int, default=2000, help="size of the vocabulary")
    parser.add_argument("--length", type=int, default=80_000, help="words of text")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradients at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="two epochs on a fifth of the text")
    options = parser.parse_args(argv)
    if options.fast:
        options.epochs, options.length = 2, options.length // 5
    return options


if __name__ == "__main__":
    sys.exit(main())
