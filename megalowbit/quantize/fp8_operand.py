"""MXFP4 as FP8 operands: what every path that makes them, and every product of them, has to agree on.

An MXFP4 number is element · 2^e with e for its block. As element · 2^(e - e_max + SHIFT), under one power of
two for the tensor, it is an FP8 number as long as e lies at most DEPTH below e_max, the largest of the blocks
that hold more than zeros and NaN.
"""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIFT = {E4M3: 6, E5M2: 13}  # 6 · 2^shift, 384 and 49152, is the largest number used
DEPTH = {E4M3: 14, E5M2: 28}  # how far below the largest exponent every element is exact
MANTISSA = {E4M3: 3, E5M2: 2}  # bits
BIAS = {E4M3: 7, E5M2: 15}
