"""Contact sheets: rows of frames as one PNG."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def save_rows(path: Path, rows: Sequence[Tensor]) -> None:
    """Write clips uint8 [T,H,W,3] of one size below each other, their frames side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet = torch.cat([torch.cat(list(row), dim=1) for row in rows])
    Image.fromarray(sheet.cpu().numpy()).save(path)
