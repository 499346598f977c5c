"""Models to train in benchmarks, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Transformer(nn.Module):
    """A causal language model with tied embeddings: 20.9 million parameters by default."""

    def __init__(self, width: int = 512, layers: int = 4, vocabulary: int = 16_000, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.mask.to(x.dtype), is_causal=True)
        return F.linear(self.norm(x), self.tokens.weight)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """Three convolutions, the stride on the middle one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


def _resnet(blocks: list[nn.Module], features: int, classes: int) -> nn.Sequential:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def resnet18(classes: int = 1000) -> nn.Sequential:
    """11,689,512 parameters at 1000 classes."""
    blocks: list[nn.Module] = [
        BasicBlock(inputs, outputs, stride)
        for inputs, outputs, stride in (
            (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
            (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
        )
    ]  # fmt: skip
    return _resnet(blocks, 512, classes)


def resnet50(classes: int = 1000) -> nn.Sequential:
    """25,557,032 parameters at 1000 classes."""
    blocks: list[nn.Module] = []
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            blocks.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return _resnet(blocks, inputs, classes)


def small_network(classes: int = 10) -> nn.Sequential:
    """To see that a benchmark runs: the layers of a ResNet without its blocks."""
    return _resnet([], 64, classes)


Task = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]


def language_task(quick: bool = False, device: str = "cpu", gpt2_small: bool = False) -> Task:
    """What makes the transformer, and its loss on 8 sequences of 128 tokens; or of GPT-2 small's 1024."""
    width, layers, vocabulary, length = (768, 12, 50_257, 1024) if gpt2_small else (512, 4, 16_000, 128)
    if quick:
        width, layers, vocabulary, length = 64, 1, 100, 16
    tokens = torch.randint(vocabulary, (8, length + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def loss(model: nn.Module) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return lambda: Transformer(width, layers, vocabulary, length).to(device), loss


def image_task(
    quick: bool = False,
    device: str = "cpu",
    channels_last: bool = True,
    batch: int = 8,
    size: int = 224,
    network: Callable[[], nn.Module] = resnet18,
) -> Task:
    """What makes the network, and its loss on square images."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    made = torch.Generator().manual_seed(0)
    images = torch.randn(2 if quick else batch, 3, *([32, 32] if quick else [size, size]), generator=made)
    images = images.to(device, memory_format=layout)
    labels = torch.randint(10, (len(images),), generator=made).to(device)

    def loss(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        wanted = images if torch.is_autocast_enabled(images.device.type) else images.to(dtype)
        return F.cross_entropy(model(wanted).float(), labels)

    return lambda: network().to(device, memory_format=layout), loss
