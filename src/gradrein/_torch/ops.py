"""ATen operations without a public name."""

import torch

upsample_bilinear2d_aa_backward = torch.ops.aten._upsample_bilinear2d_aa_backward
upsample_bicubic2d_aa_backward = torch.ops.aten._upsample_bicubic2d_aa_backward
cdist_backward = torch.ops.aten._cdist_backward
