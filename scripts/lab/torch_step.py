"""The bare training step of bench.py's networks in PyTorch, channels last. Its Python needs nothing of this project."""
import json
import sys

import torch
from torch import nn

CLASSES = 10


def conv(channels: int, filters: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels, filters, size, stride, padding=size // 2)


class Block(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int, activate_shortcut: bool):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels, 1e-3, 1e-3), conv(channels, filters, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(filters, 1e-3, 1e-3), conv(filters, filters, 3)
        self.shortcut = conv(channels, filters, 1, stride) if channels != filters else nn.Identity()
        self.activate_shortcut = activate_shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.leaky_relu(self.norm1(x), 0.1)
        x = y if self.activate_shortcut else x
        y = self.conv2(nn.functional.leaky_relu(self.norm2(self.conv1(y)), 0.1))
        return y + self.shortcut(x)


def main(setting: dict) -> None:
    """Prints its number of weights, then runs as many steps as each line on stdin says, and answers to each."""
    layers, channels = [conv(3, 16, 3)], 16
    for stage in range(setting["scales"]):
        for block in range(setting["repeat"]):
            filters = setting["filters"] << stage
            layers.append(Block(channels, filters, 2 if stage and not block else 1, not stage and not block))
            channels = filters
    layers += [nn.BatchNorm2d(channels, 1e-3, 1e-3), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
               nn.Linear(channels, CLASSES)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.03, momentum=0.9, nesterov=True)
    x = torch.rand(setting["images"], 3, setting["size"], setting["size"]).to(memory_format=torch.channels_last)
    y = torch.randint(0, CLASSES, [setting["images"]])
    print(sum(weights.numel() for weights in network.parameters()), flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(network(2 * x - 1), y)
            loss.backward()
            optimizer.step()
        print(loss.item(), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
