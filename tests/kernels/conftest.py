"""Where there is no card, Triton kernels run in its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so it comes before their import
    pytest.importorskip("triton")
