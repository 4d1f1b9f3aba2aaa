"""Says on which device a tensor of `cuda` is: a module to be run."""

import torch

if __name__ == "__main__":
    print(torch.ones(2, device="cuda").device, torch.cuda.is_available())
