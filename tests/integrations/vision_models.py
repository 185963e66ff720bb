"""Small models built as timm builds them: a ViT with layer scale, a ConvNeXt and a ResNet with squeeze-excite."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, width: int, start: float = 0.1) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(start * torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width, eps=1e-6), Attention(width, heads), LayerScale(width)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(width, eps=1e-6), Mlp(width, 2 * width), LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 12, heads: int = 2, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 5, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.cls_token)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width, 2 * width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + y * self.gamma.reshape(1, -1, 1, 1)


class ConvNeXt(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 12), classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 2, stride=2), LayerNorm2d(widths[0], eps=1e-6))
        down = nn.Sequential(LayerNorm2d(widths[0], eps=1e-6), nn.Conv2d(widths[0], widths[1], 2, stride=2))
        self.stages = nn.Sequential(ConvNeXtBlock(widths[0]), down, ConvNeXtBlock(widths[1]))
        self.norm, self.fc = nn.LayerNorm(widths[1], eps=1e-6), nn.Linear(widths[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.stages(self.stem(x)).mean((2, 3))))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.act = nn.Conv2d(channels, channels // 2, 1), nn.ReLU()
        self.fc2, self.gate = nn.Conv2d(channels // 2, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(inputs, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        self.conv2 = nn.Conv2d(6, 6, 3, stride=stride, padding=1, bias=False)
        self.bn2, self.act2, self.se = nn.BatchNorm2d(6), nn.ReLU(), SqueezeExcite(outputs)
        self.conv3, self.bn3, self.act3 = nn.Conv2d(6, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act2(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))))
        return self.act3(self.se(self.bn3(self.conv3(y))) + self.downsample(x))


class SEResNet(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1, self.layer2 = Bottleneck(8, 8, 1), Bottleneck(8, 12, 2)
        self.global_pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.act1(self.bn1(self.conv1(x)))))
        return self.fc(self.global_pool(x).flatten(1))


MODELS = {"vit": VisionTransformer, "convnext": ConvNeXt, "se_resnet": SEResNet}
