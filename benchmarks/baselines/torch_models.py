"""The models of `dtk.bench.models`, in PyTorch: equal layers, as many parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

_CLASSES = 10
_WORDS = 200_000


class Problem(NamedTuple):
    """A model and what it reads.

    Attributes:
        build: Makes the model.
        rows: From a number, so many rows of input.
        sparse: Whether one of its gradients is sparse.
    """

    build: Callable[[], Any]
    rows: Callable[[int], Any]
    sparse: bool = False

    def data(self, count: int) -> tuple[Any, Any]:
        """Return random rows and their labels.

        Args:
            count: How many.
        """
        return self.rows(count), torch.randint(_CLASSES, (count,))


class ResNet20(nn.Module):
    """ResNet of 20 layers for CIFAR-10 (He et al. 2016).

    Where the image shrinks, shortcuts pad channels with zeros (option A).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 16)
        widths = [16] * 3 + [32] * 3 + [64] * 3
        self.blocks = nn.ModuleList(
            nn.ModuleList([_conv(before, after, 1 + (after > before)), _conv(after, after)])
            for before, after in zip([16, *widths], widths, strict=False)
        )
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, x: Any) -> Any:
        """Compute logits.

        Args:
            x: Images, float32, shape `[rows, 3, 32, 32]`.

        Returns:
            Shape `[rows, 10]`.
        """
        x = torch.relu(self.stem(x))
        for first, second in self.blocks:
            y = second(torch.relu(first(x)))
            if y.shape != x.shape:
                x = nn.functional.avg_pool2d(x, 2)
                x = torch.cat([x, torch.zeros_like(x)], dim=1)
            x = torch.relu(x + y)
        return self.head(x.mean((2, 3)))


def _conv(before: int, after: int, stride: int = 1) -> Any:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after)
    )


def mlp() -> Any:
    """Return a model of three hidden layers of 2048 units."""
    layers: list[Any] = []
    for before in (1024, 2048, 2048):
        layers += [nn.Linear(before, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, _CLASSES))


def embedding() -> Any:
    """Return a model of the mean of eight rows of a table."""
    table = nn.EmbeddingBag(_WORDS, 64, mode="mean", sparse=True)
    return nn.Sequential(table, nn.Linear(64, _CLASSES))


class Transformer(nn.Module):
    """One encoder block of width 256 and eight heads, over 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            256, 8, 1024, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(256, _CLASSES)

    def forward(self, x: Any) -> Any:
        """Compute logits.

        Args:
            x: float32, shape `[rows, 32, 256]`.

        Returns:
            Shape `[rows, 10]`.
        """
        return self.head(self.block(x).mean(1))


def _normal(*shape: int) -> Callable[[int], Any]:
    return lambda count: torch.randn(count, *shape)


PROBLEMS = {
    "resnet20": Problem(ResNet20, _normal(3, 32, 32)),
    "mlp": Problem(mlp, _normal(1024)),
    "embedding": Problem(embedding, lambda count: torch.randint(_WORDS, (count, 8)), sparse=True),
    "transformer": Problem(Transformer, _normal(32, 256)),
}
