"""Your own loop on several devices with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_loop.py digits
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allmlp


def main(folder: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(folder)
    # After `train`, so that its DistributedDataParallel has been freed: afterwards it may wait forever for gloo.
    dist.destroy_process_group()


def train(folder: str, epochs: int = 3) -> None:
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data)

    model = allmlp.create("mixer_nano", num_classes=10, in_chans=1, img_size=8, patch_size=2, overrides={"depth": 2})
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, targets in DataLoader(data, 32, sampler=sampler):
            loss = cross_entropy(model(images.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        allmlp.save(model.module, folder)


if __name__ == "__main__":
    main(sys.argv[1])
