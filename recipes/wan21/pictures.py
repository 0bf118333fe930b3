"""Still pictures: RGB from any image file, and fitting to a size.

Legend: F frames, H, W pixels. Pictures are uint8 `[3, F, H, W]`; an image has F = 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from zellige_lightning.errors import DataError

# What Pillow may open: formats without scripts or references to other files.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF", "GIF")


def decode_image(medium: Path | IO[bytes], name: str | None = None) -> Tensor:
    """`[3, 1, H, W]`: upright by its EXIF tag, RGB from any mode, transparency on white.

    Args:
        name: in messages, for a medium that is not a path.

    Raises:
        DataError: missing, truncated or unreadable.
    """
    name = name or (medium.name if isinstance(medium, Path) else "without a name")
    try:
        with Image.open(medium, formats=FORMATS) as image:
            rgb = _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as error:
        raise DataError(f"image {name!r} does not exist", fix="correct its path in the data set") from error
    except UnidentifiedImageError as error:
        raise DataError(f"image {name!r} cannot be read: unknown format", fix="convert the file") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image {name!r} cannot be read: {error}", fix="replace or remove the file"
        ) from error
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[:, None].contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits per pixel; Pillow itself would cut at 255
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values / max(255.0, float(values.max())) * 255.0).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def covering_size(
    source: tuple[int, int], target: tuple[int, int], pixel_aspect: float = 1.0
) -> tuple[int, int]:
    """(H, W) to which a picture is resized so that it just covers `target`, which is then cut out of it.

    Args:
        pixel_aspect: width of a source pixel over its height.
    """
    old_height, old_width = source[0], source[1] * pixel_aspect
    scale = max(target[0] / old_height, target[1] / old_width)
    return max(target[0], round(old_height * scale)), max(target[1], round(old_width * scale))


def fit(pictures: Tensor, height: int, width: int, *, pixel_aspect: float = 1.0) -> Tensor:
    """Resize so that `[3, F, H, W]` just covers (height, width), then cut the centre out of it."""
    new = covering_size((pictures.shape[-2], pictures.shape[-1]), (height, width), pixel_aspect)
    frames = pictures.transpose(0, 1)
    if new != tuple(pictures.shape[-2:]):
        resized = F.interpolate(frames.float(), size=new, mode="bicubic", antialias=True, align_corners=False)
        frames = resized.round().clamp(0, 255).to(torch.uint8)
    top, left = (new[0] - height) // 2, (new[1] - width) // 2
    return frames[:, :, top : top + height, left : left + width].transpose(0, 1)
