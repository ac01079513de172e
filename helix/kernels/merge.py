"""Merge: partial attention results over disjoint parts of a sequence -> the result over all of it.

Letters: Z partials, T tokens, H heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    """Exact softmax attention over the union of Z disjoint key sets, from the partials over each.

    With ``m = max_z lse_z`` and ``w_z = exp(lse_z - m)``: ``out = sum_z w_z out_z / sum_z w_z`` and
    ``lse = m + log sum_z w_z``.

    Parameters
    ----------
    out_ZTHD
        [Z, T, H, D] partial outputs, any float dtype.
    lse_ZTH
        fp32 [Z, T, H], natural log. A value that is not finite means an empty part: its weight is 0 and its output is
        not read. A NaN output beside a finite lse stays NaN.

    Returns
    -------
    out_THD in the dtype of the partials and fp32 lse_TH; where every part is empty, 0 and -inf.
    """
    filled = torch.isfinite(lse_ZTH)
    lse = lse_ZTH.masked_fill(~filled, -torch.inf)
    peak_TH = lse.amax(0)
    weight_ZTH = torch.where(filled, torch.exp(lse - peak_TH.masked_fill(peak_TH == -torch.inf, 0.0)), 0.0)
    total_TH = weight_ZTH.sum(0)
    share_ZTH = weight_ZTH / total_TH.masked_fill(total_TH == 0, 1.0)
    read_ZTHD = out_ZTHD.float().masked_fill(~filled.unsqueeze(-1), 0.0)
    out_THD = (read_ZTHD * share_ZTH.unsqueeze(-1)).sum(0)
    return out_THD.to(out_ZTHD.dtype), peak_TH + torch.log(total_TH)
