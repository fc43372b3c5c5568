"""Which group of the transformer's anatomy an operator belongs to, as data.

Groups: Ivanov et al. 2021, Data Movement Is All You Need, section 3, as transformers' Model training anatomy has them.
A fused attention kernel is a contraction, though there is a softmax in it; sums, copies and look-ups are of no group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Group = Literal["contractions", "normalizations", "element-wise", "other"]
GROUPS: tuple[Group, ...] = ("contractions", "normalizations", "element-wise", "other")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of torch's operators, without `aten::`, underscores at either end, `_foreach` and `_backward…`.
NAMES: Mapping[Group, frozenset[str]] = {
    "contractions": _words(
        """
        addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d convolution dot einsum linear matmul mkldnn_convolution
        mkldnn_linear mkldnn_rnn_layer mm mv tensordot vdot int_mm scaled_mm grouped_mm scaled_grouped_mm
        scaled_dot_product_attention scaled_dot_product_attention_math scaled_dot_product_flash_attention
        scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention
        scaled_dot_product_cudnn_attention scaled_dot_product_fused_attention_overrideable flash_attention_forward
        flash_attention efficient_attention_forward efficient_attention cudnn_attention_forward thnn_fused_lstm_cell
        cudnn_convolution slow_conv2d_forward flex_attention
        """
    ),
    "normalizations": _words(
        """
        batch_norm cudnn_batch_norm fused_rms_norm group_norm layer_norm log_softmax logsumexp native_batch_norm
        native_group_norm native_layer_norm rms_norm safe_softmax softmax std_mean var_mean masked_softmax
        """
    ),
    "element-wise": _words(
        """
        abs add addcdiv addcmul bernoulli bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clip cos
        div dropout elu eq erf exp exp2 expm1 feature_dropout floor fused_adam fused_adamw fused_adagrad fused_sgd
        fused_dropout ge gelu glu gt hardtanh isfinite isnan le leaky_relu lerp log log1p logical_and logical_not
        logical_or lt masked_fill masked_scale maximum minimum mul native_dropout ne neg pow reciprocal relu rsqrt rsub
        sigmoid sign silu sin softplus sqrt square sub tanh threshold where xlogy
        """
    ),
}
# Kernels that torch.compile makes: inductor names them by what they are.
KERNELS: Mapping[str, Group] = {
    "triton_tem_": "contractions",
    "triton_mm_": "contractions",
    "triton_per_": "normalizations",
    "triton_red_": "normalizations",
    "triton_poi_": "element-wise",
}
_BARE = re.compile(r"^(?:aten::)?_*(?:foreach_)?(?P<bare>\w+?)(?:_backward(?:_\w+)?)?_*$")


def group_of(name: str) -> Group:
    """The group of an operator, by the name that the profiler gives it."""
    for prefix, group in KERNELS.items():
        if name.startswith(prefix):
            return group
    bare = _BARE.match(name)
    found = (group for group, names in NAMES.items() if bare and bare["bare"] in names)
    return next(found, "other")
