"""The autoencoder: which digits, in which style, and an image of each that one decoder draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.dvae.bottlenecks import Bottleneck
from experiments.dvae.data import CLASSES, SIDE

STYLE = 32
CHANNELS = (16, 32, 64)  # of the encoder: 28 -> 14 -> 7 -> 4
DECODER_CHANNELS = (32, 16, 8)  # 7 -> 14 -> 28


class Output(NamedTuple):
    image: Tensor  # (batch, 28, 28)
    theta: Tensor  # (batch, 10)
    y: Tensor  # (batch, 10)
    style_divergence: Tensor  # (batch,): of all ten Gaussians from the standard one
    parts: Tensor  # (batch, 10, 28, 28): the image of each slot


class Autoencoder(nn.Module):
    def __init__(self, bottleneck: Bottleneck) -> None:
        super().__init__()
        self.bottleneck = bottleneck
        self.encoder = nn.Sequential(
            *(
                layer
                for before, after in zip((1, *CHANNELS), CHANNELS)
                for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU())
            ),
            nn.Flatten(),
        )
        width = CHANNELS[-1] * 4 * 4
        self.select, self.style = nn.Linear(width, CLASSES), nn.Linear(width, CLASSES * 2 * STYLE)
        self.embeddings = nn.Parameter(torch.randn(CLASSES, STYLE))
        first, second, third = DECODER_CHANNELS
        self.decoder = nn.Sequential(
            nn.Linear(2 * STYLE, first * 7 * 7),
            nn.ReLU(),
            nn.Unflatten(-1, (first, 7, 7)),
            nn.ConvTranspose2d(first, second, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(second, third, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.Conv2d(third, 1, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor, generator: torch.Generator) -> Output:
        """On a GPU encoder and decoder compute in bfloat16; what is between them is float32, its products TF32."""
        batch = len(images)
        half = torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda)
        with half:
            hidden = self.encoder(images[:, None])
        hidden = hidden.float()
        theta = self.select(hidden)
        mean, log_variance = self.style(hidden).view(batch, CLASSES, 2, STYLE).unbind(2)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        style = mean + noise * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum((1, 2))
        y = self.bottleneck(theta, generator)
        with half:
            drawn = self.decoder(torch.cat([style, self.embeddings.expand_as(style)], -1).flatten(0, 1))
        parts = drawn.float().view(batch, CLASSES, SIDE, SIDE)
        image = torch.einsum("bi,bihw->bhw", y, parts) / self.bottleneck.k
        return Output(image, theta, y, divergence, parts)
