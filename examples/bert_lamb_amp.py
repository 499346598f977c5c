"""A small BERT, pretrained on masked words with LAMB; each step gathers the gradients of several batches.

`python examples/bert_lamb_amp.py` takes half a minute on a CPU. The text is the source of Python's own library.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_apex as apex
from lightning_apex import amp

PAD, MASK, UNKNOWN, SPECIAL = 0, 1, 2, 3
MODULES = ("argparse", "ast", "calendar", "configparser", "datetime", "fractions", "inspect", "pathlib", "statistics")


class SmallBert(nn.Module):
    """A transformer encoder whose output layer shares the embedding's weight."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.words(tokens) + self.places)
        return F.linear(hidden, self.words.weight, self.bias)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines, words = corpus(options.words, options.length)
    lines = lines.to(device)
    model = SmallBert(words, options.length, options.width, options.layers, heads=4).to(device)
    optimizer = optimizer_for(model, options)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=options.opt_level,
        half_dtype="bfloat16" if device.type == "cpu" and options.opt_level in ("O1", "O2", "O3") else None,
    )
    warm_up = max(1, options.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (options.steps - step) / (options.steps - warm_up + 1))
    )

    losses: list[float] = []
    began = time.perf_counter()
    for step in range(options.steps):
        total = 0.0
        for part in range(options.accumulate):
            tokens, targets = masked(lines[torch.randint(len(lines), (options.batch_size,))], words)
            output = model(tokens)
            loss = F.cross_entropy(output[targets != PAD], targets[targets != PAD]) / options.accumulate
            last = part == options.accumulate - 1
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
        if (step + 1) % max(1, options.steps // 10) == 0:
            print(
                f"step {step + 1:4}  loss {total:.3f}  {(time.perf_counter() - began) / (step + 1):.2f} s a step",
                flush=True,
            )
    return int(not sum(losses[-3:]) / 3 < losses[0] * (0.98 if options.fast else 0.75))


def optimizer_for(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Norms and biases go without weight decay, and so without LAMB's trust ratio."""
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return getattr(apex.optimizers, options.optimizer)(groups, lr=options.lr)


def masked(lines: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Of each line 15% of the words are asked for: most of them masked, some replaced, some left."""
    asked = (torch.rand(lines.shape, device=lines.device) < 0.15) & (lines >= SPECIAL)
    asked[:, 0] |= ~asked.any(1)
    lot = torch.rand(lines.shape, device=lines.device)
    tokens = torch.where(asked & (lot < 0.8), MASK, lines)
    tokens = torch.where(asked & (lot > 0.9), torch.randint_like(lines, SPECIAL, words), tokens)
    return tokens, torch.where(asked, lines, PAD)


def corpus(most: int, length: int) -> tuple[Tensor, int]:
    """Rows of ``length`` words, and the number of different ones."""
    folder = Path(os.__file__).parent
    text = "\n".join((folder / f"{name}.py").read_text() for name in MODULES if (folder / f"{name}.py").exists())
    found = re.findall(r"[A-Za-z_]\w*|\d+|[^\w\s]", text)
    known = {word: i for i, (word, _) in enumerate(Counter(found).most_common(most - SPECIAL), SPECIAL)}
    numbers = torch.tensor([known.get(word, UNKNOWN) for word in found])
    return numbers[: len(numbers) // length * length].view(-1, length), len(known) + SPECIAL


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
    parser.add_argument("--optimizer", default="FusedLAMB", help="a class of lightning_apex.optimizers")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=4, help="batches in a step")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=48, help="words in a line")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--words", type=int, default=2000, help="size of the vocabulary")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few steps, and few demands on them")
    options = parser.parse_args(argv)
    if options.fast:
        options.steps, options.layers, options.width = 12, 1, 64
    return options


if __name__ == "__main__":
    sys.exit(main())
