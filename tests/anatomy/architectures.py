"""Small networks of every shape that the scale graph must understand, each with an example."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet18(nn.Module):
    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            stages += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


class Branching(nn.Module):
    """Cannot be traced: which way it goes depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h if h.sum() > 0 else -h


class PreActBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(2, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm1(x), 0.2)
        skip = x if self.shortcut is None else self.shortcut(h)
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + skip


class PreActResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(PreActBlock(8, 8, 1), PreActBlock(8, 16, 2), PreActBlock(16, 16, 1))
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], dim=1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1 = nn.Sequential(*(DenseLayer(8 + 4 * i, 4) for i in range(3)))
        self.transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2))
        self.block2 = nn.Sequential(*(DenseLayer(10 + 4 * i, 4) for i in range(2)))
        self.norm = nn.BatchNorm2d(18)
        self.head = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block2(self.transition(self.block1(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(F.relu(self.norm(h)), 1).flatten(1))


class PlainDenseNet(nn.Module):
    """Concatenations without a norm layer after them: what is concatenated must share a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(8, 4)])
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [F.relu(self.layers[0](x))]
        for layer in self.layers[1:]:
            features.append(F.relu(layer(torch.cat(features, dim=-1))))
        return self.head(torch.cat(features, dim=-1))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
                         nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double_conv(3, 6), double_conv(6, 8), double_conv(8, 12)
        self.up2, self.merge2 = nn.ConvTranspose2d(12, 8, 2, 2), double_conv(16, 8)
        self.up1, self.merge1 = nn.ConvTranspose2d(8, 6, 2, 2), double_conv(12, 6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        h = self.middle(F.max_pool2d(b, 2))
        h = self.merge2(torch.cat([self.up2(h), b], dim=1))
        h = self.merge1(torch.cat([F.interpolate(self.up1(h), size=a.shape[2:], mode="bilinear"), a], dim=1))
        return self.head(h)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.ReLU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(4, 12), MixerBlock(4, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class Attention(nn.Module):
    """Written by hand, with a packed projection that is reshaped and unbound, and a scaled softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int, activation: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 12, heads: int = 3, depth: int = 2, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, activation()) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.attn(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
        x = x + self.proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, tokens, width))
        return x + self.fc_proj(F.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    """nanoGPT-shaped, the output layer tied to the embedding, more positions than the example uses."""

    def __init__(
        self, width: int = 12, heads: int = 2, depth: int = 2, vocabulary: int = 30, context: int = 16
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, context) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own transformer layers, post-norm and with packed projections."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed = nn.Linear(6, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with keys of another source: there the packed *weight* is cut, not the output."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(6, 8), nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = F.relu(self.y(y))
        return self.head(F.relu(self.attention(F.relu(self.x(x)), y, y)[0]))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.body(F.relu(self.stem(x))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3))))))
        return self.head((h * gate[:, :, None, None]).mean((2, 3)))


class Shared(nn.Module):
    """A layer used twice, at depths whose scales must then agree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.shared(F.relu(self.first(x))))
        return self.last(F.relu(self.shared(h)))


class DictInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(F.relu(self.left(batch["left"]) + self.right(batch["right"])))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.policy, self.value = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"policy": self.policy(h), "value": self.value(h)}


class CReLUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.cat([F.relu(h), F.relu(-h)], dim=-1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(6, 8), kind(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(F.relu(self.embed(x)))[0][:, -1])


class Interleaved(nn.Module):
    """Queries, keys and values head by head, as GPT-NeoX and BLOOM store them, with relu attention."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.qkv, self.head = nn.Linear(6, width), nn.Linear(width, 3 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        q, k, v = self.qkv(h).view(*h.shape[:2], self.heads, 3, -1).unbind(3)
        weights = F.relu(torch.einsum("bthd,bshd->bhts", q, k)).softmax(-1)
        return self.head(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2).mean(1))


class GatedLinear(nn.Module):
    """GLU with a packed projection: one half is a gate, whose scale is fixed, the other is free."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.norm, self.head = nn.Linear(6, 16), nn.LayerNorm(6), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.packed(self.norm(x)).chunk(2, dim=-1)
        return self.head(F.relu(value * torch.sigmoid(gate)))


Maker = Callable[[], tuple[nn.Module, Any]]


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def sequences() -> Tensor:
    return torch.randn(3, 5, 6)


def vectors() -> Tensor:
    return torch.randn(16, 6)


OWN: dict[str, Maker] = {
    "resnet18": lambda: (ResNet18(), torch.randn(4, 3, 16, 16)),
    "preact_resnet": lambda: (PreActResNet(), images()),
    "densenet": lambda: (DenseNet(), images()),
    "densenet_plain": lambda: (PlainDenseNet(), vectors()),
    "unet": lambda: (UNet(), images()),
    "mixer": lambda: (Mixer(), images()),
    "vit_relu": lambda: (ViT(), images()),
    "gpt_tied": lambda: (GPT(), torch.randint(0, 30, (2, 9))),
    "encoder": lambda: (Encoder(), sequences()),
    "cross_attention": lambda: (CrossAttention(), (sequences(), torch.randn(3, 4, 6))),
    "squeeze_excite": lambda: (SqueezeExcite(), images()),
    "shared": lambda: (Shared(), vectors()),
    "dict_input": lambda: (DictInput(), ({"left": torch.randn(4, 6), "right": torch.randn(4, 4)},)),
    "two_heads": lambda: (TwoHeads(), vectors()),
    "crelu": lambda: (CReLUNet(), vectors()),
    "lstm": lambda: (Recurrent(nn.LSTM), sequences()),
    "gru": lambda: (Recurrent(nn.GRU), sequences()),
    "interleaved": lambda: (Interleaved(), sequences()),
    "gated": lambda: (GatedLinear(), vectors()),
}


def gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 30, (2, 9))}


def hf_vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8,
                       patch_size=4, num_labels=5)  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": images()}


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 30, (2, 9))}


HUGGING_FACE: dict[str, Maker] = {"hf_gpt2": gpt2, "hf_vit": hf_vit, "hf_llama": llama}
ALL = OWN | HUGGING_FACE
