"""What a program that trainkit starts sees of its card: one JSON line."""

import json
import os

import torch

card = torch.cuda.get_device_properties(0)
told = {
    "torch_uuid": f"GPU-{card.uuid}",
    "name": card.name,
    "count": torch.cuda.device_count(),
    "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "order": os.environ.get("CUDA_DEVICE_ORDER"),
    "sum": float(torch.ones(8, device="cuda").sum()),
}
print(json.dumps(told), flush=True)
