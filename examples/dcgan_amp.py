"""A DCGAN on handwritten digits: two models, two optimizers, three losses, each with a loss scale of its own.

`python examples/dcgan_amp.py` takes about twenty seconds on a CPU. It is the loop that Apex's users know, with one
import changed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_apex as apex
from lightning_apex import amp

LATENT = 32
SHADES = " .:-=+*#%@"


def digits(device: torch.device) -> Tensor:
    """1,797 images, 1x16x16, between -1 and 1."""
    pixels = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return F.interpolate(pixels, size=16, mode="bilinear", align_corners=False).to(device)


def generator(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
        nn.Flatten(0),
    )


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.05)


def batches(images: Tensor, size: int) -> Iterator[Tensor]:
    for rows in torch.randperm(len(images)).split(size):
        if len(rows) == size:
            yield images[rows]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = digits(device)
    net_d = discriminator(options.width).to(device).apply(init_weights)
    net_g = generator(options.width).to(device).apply(init_weights)
    optimizer_d = apex.optimizers.FusedAdam(net_d.parameters(), lr=options.lr, betas=(0.5, 0.999))
    optimizer_g = apex.optimizers.FusedAdam(net_g.parameters(), lr=options.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    [net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
        [net_d, net_g],
        [optimizer_d, optimizer_g],
        opt_level=options.opt_level,
        num_losses=3,
        half_dtype="bfloat16" if device.type == "cpu" and options.opt_level in ("O1", "O2", "O3") else None,
    )

    began = time.perf_counter()
    for epoch in range(options.epochs):
        losses: list[Tensor] = []
        for real in batches(images, options.batch_size):
            ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            fake = net_g(torch.randn(len(real), LATENT, 1, 1, device=device))

            net_d.zero_grad()
            error_real = criterion(net_d(real), ones)
            with amp.scale_loss(error_real, optimizer_d, loss_id=0) as scaled_loss:
                scaled_loss.backward()
            error_fake = criterion(net_d(fake.detach()), zeros)
            with amp.scale_loss(error_fake, optimizer_d, loss_id=1) as scaled_loss:
                scaled_loss.backward()
            optimizer_d.step()

            net_g.zero_grad()
            error_g = criterion(net_d(fake), ones)
            with amp.scale_loss(error_g, optimizer_g, loss_id=2) as scaled_loss:
                scaled_loss.backward()
            optimizer_g.step()
            losses.append(torch.stack([error_real, error_fake, error_g]).detach())
        real_loss, fake_loss, g_loss = torch.stack(losses).mean(0).tolist()
        print(f"epoch {epoch + 1:2}  D(real) {real_loss:.3f}  D(fake) {fake_loss:.3f}  G {g_loss:.3f}")

    scales = {name: state.get("scale", 1.0) for name, state in amp.state_dict().items()}
    print(f"{time.perf_counter() - began:.0f} s; loss scales {scales}")
    with torch.no_grad():
        samples = net_g(torch.randn(256, LATENT, 1, 1, device=device)).float()
    show(samples[:4])
    off = (samples.mean(0) - images.mean(0)).abs().mean().item()
    print(f"the mean of 256 samples is {off:.3f} from the mean digit (0: equal, 1: half the range)")
    return int(not off < (1.0 if options.fast else 0.25))


def show(samples: Tensor) -> None:
    levels = ((samples.squeeze(1).clamp(-1, 1) + 1) / 2 * (len(SHADES) - 1)).round().int().tolist()
    for rows in zip(*levels, strict=True):
        print("   ".join("".join(2 * SHADES[value] for value in row) for row in rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="one epoch, no demands on the samples")
    options = parser.parse_args(argv)
    if options.fast:
        options.epochs = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
