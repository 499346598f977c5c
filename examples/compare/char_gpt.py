"""A small GPT on characters, which reads the language reference that comes with Python (`help("yield")` shows it)."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each with the same window one character on."""

    def __init__(self, codes: Tensor, context: int) -> None:
        self.codes, self.context = codes, context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.codes[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]


class PythonReference(LightningDataModule):
    def __init__(self, context: int = 64, batch_size: int = 32) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size

    def setup(self, stage: str) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        # ASCII alone, so that the alphabet is the same for every version of Python.
        self.train = Text(torch.tensor(list(text.encode("ascii", "replace"))), self.context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)


class Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm and around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(LightningModule):
    """Its optimizer is the config's."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, context: int = 64) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.characters(codes) + self.positions(places))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        codes, targets = batch
        return F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
