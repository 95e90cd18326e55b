"""An output head with INT8 products for any vocabulary, such as GPT-2's of 50257 tokens.

TMA reads rows of a multiple of 16 bytes. Codes of the logits' gradient and of the weight's
transpose have as many bytes per row as there are tokens, so both are padded, as cuBLAS's operands
would have to be: the three products of 8192×1024 by 50257 take 21 ms in BF16 (H100).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import Int8Linear
from jetfire.nn.products import QuantisedWeight, checked_weight, is_dtensor, quantised_weight


class Int8Head(Int8Linear):
    """`Int8Linear` whose outputs are padded to whole blocks for its products; results have none.

    Arguments are those of `Int8Linear`.
    """

    def codes(self) -> Quantized:
        """Return the codes of the padded weight and their transpose, once per optimizer step."""
        weight = checked_weight(self.weight)
        return self._quantised.found(
            weight, self.block, lambda: quantised_weight(self._padded(weight), self.block)
        )

    def int8_weights(self) -> list[tuple[torch.Tensor, QuantisedWeight, Block]]:
        """Return none: the optimizer would write codes of the weight without its padding."""
        return []

    def watched_weight(self) -> tuple[torch.Tensor, QuantisedWeight, Block]:
        """Return the weight, without its padding, with its codes and the side of their blocks."""
        return self.weight, self._quantised, self.block

    def unpadded(self, gradient: Quantized) -> Quantized:
        """Return the codes of the outputs' gradient without those of the padding."""
        assert gradient.q is not None
        q = gradient.q[:, : self.out_features]
        return Quantized(q, gradient.scale, block=gradient.block)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features) to (…, out_features), in the autocast dtype if there is one."""
        if is_dtensor(self.weight):  # by `ColwiseParallel`: a process's part may be of any size
            return super().forward(input)
        bias = None if self.bias is None else self._padded(self.bias)
        # What the gradient is of, and nothing reads: each token of a generation would copy it.
        weight = self._padded(self.weight) if torch.is_grad_enabled() else self.weight
        return self._applied(input, weight, bias, self.codes())[..., : self.out_features]

    def _padded(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter with rows of zeros up to a whole block."""
        more = -self.out_features % self.block
        return F.pad(parameter, (0, 0) * (parameter.dim() - 1) + (0, more))
