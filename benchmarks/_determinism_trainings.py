"""Three fixed trainings at level everywhere, whose digests are the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mend.determinism import DeterministicTrainer, enable

WORDS, ROWS, TOKENS, STEPS, SEED = 61, 8, 24, 4, 33


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((20, 70), (70, 45), (45, 10)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layers[0](x), approximate="tanh")
        return cast(Tensor, self.layers[2](F.relu(self.layers[1](x))))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixed(self.norm_in(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm_mid(x))))))


class Gpt(nn.Module):
    """With a head that is also the embedding."""

    def __init__(self, width: int = 36, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words_BT: Tensor) -> Tensor:
        place_BT = torch.arange(words_BT.shape[1], device=words_BT.device).expand(words_BT.shape)
        x = self.words(words_BT) + self.places(place_BT)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_in, self.norm_mid = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        normal = self.norm_in(x)
        query, key, value = (
            self.split(each(normal)) for each in (self.query, self.key, self.value)
        )
        query, key = (rotated(each, cos_TD, sin_TD) for each in (query, key))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        normal = self.norm_mid(x)
        return cast(Tensor, x + self.down(F.silu(self.gate(normal)) * self.up(normal)))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Llama(nn.Module):
    def __init__(
        self, width: int = 40, heads: int = 4, groups: int = 2, hidden: int = 100, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, WORDS, bias=False)
        self.head_width = width // heads

    def forward(self, words_BT: Tensor) -> Tensor:
        device = words_BT.device
        rate_D = torch.exp(torch.arange(0, self.head_width, 2, device=device) * -0.9)
        angle_TD = torch.arange(words_BT.shape[1], device=device)[:, None] * rate_D
        x, cos_TD, sin_TD = self.embedding(words_BT), angle_TD.cos(), angle_TD.sin()
        for block in self.blocks:
            x = block(x, cos_TD, sin_TD)
        return cast(Tensor, self.head(self.norm(x)))


def rotated(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos_TD - other * sin_TD, other * cos_TD + one * sin_TD], -1)


def loss_of_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_of_words(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def numbers(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 20), torch.randint(10, (rows,))


def words(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(WORDS, (rows, TOKENS + 1))
    return drawn[:, :-1], drawn[:, 1:]


Batch = tuple[Tensor, Tensor]
Training = tuple[
    Callable[[], nn.Module], Callable[[int], Batch], Callable[[nn.Module, Batch], Tensor]
]

TRAININGS: dict[str, Training] = {
    "mlp": (Mlp, numbers, loss_of_classes),
    "gpt": (Gpt, words, loss_of_words),
    "llama": (Llama, words, loss_of_words),
}


DIGESTS = {
    "mlp": "05034732cc03b618410c0e22547c54ecc32030051b0825a69da3141d660f7240",
    "gpt": "a31cf2fa34ecbec4e4699d41af7edbc99c43d1ced2ad029466733834ea4c5513",
    "llama": "be6dd9bde6aaeef96f63d690d5f26fd7f610b45de62c7c1db8e029c7b22eb40b",
}
"""After STEPS steps, however the batch is cut."""


def train(name: str, device: str = "cpu", microbatches: int = 1) -> list[str]:
    """The loss of every step, in hexadecimal digits, and the digest at the end."""
    make, draw, loss_of = TRAININGS[name]
    with enable(SEED, "everywhere"):
        with torch.device(device):
            model = make()
        data, labels = draw(STEPS * ROWS)
        order = torch.randperm(STEPS * ROWS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        trainer = DeterministicTrainer(
            model,
            optimizer,
            SEED,
            level="everywhere",
            microbatches=microbatches,
            grad_norm_max=1.0,
        )
        losses = []
        for number in order.view(STEPS, ROWS):
            batch = data[number].to(device), labels[number].to(device)
            losses.append(float(trainer.step(batch, loss_of)).hex())
        return [*losses, trainer.digest()]
