"""The three matrix products of a low-bit linear layer.

A linear layer runs one product in forward and two in backward. With M tokens, K input features and N output
features:

    product        computes                          left operand     right operand    result
    output         input · weightᵀ + bias            input (M, K)     weight (N, K)    (M, N)
    grad_input     grad_output · weight              grad (M, N)      weight (N, K)    (M, K)
    grad_weight    grad_outputᵀ · input              grad (M, N)      input (M, K)     (N, K)

Each product sums over another axis: `output` over K, `grad_input` over N, `grad_weight` over the tokens M.
A block-quantised matrix is stored with its blocks along the last, contiguous axis. The recipe's layout
decides which axis that is:

    layout         operand        stored codes          blocks along    read by
    single_copy    input          (M, K)                K               output, grad_weight
                   weight         (N, K)                K               output, grad_input
                   grad_output    (M, N)                N               grad_input, grad_weight
    per_gemm       input          (M, K)                K               output
                   inputᵀ         (K, M)                M               grad_weight
                   weight         (N, K)                K               output
                   weightᵀ        (K, N)                N               grad_input
                   grad_output    (M, N)                N               grad_input
                   grad_outputᵀ   (N, M)                M               grad_weight

In `per_gemm` every product reads blocks along the axis that it sums over. A weight in square tiles needs no
second copy: its codes serve `output` and `grad_input`, because transposing a tile does not change its scale.

Forward keeps the operand of `grad_weight` (the input) and that of `grad_input` (the weight) for backward, as
packed codes and scales: 4.5 bits an element for NVFP4 (4 + 8/16), 4.25 for MXFP4 (4 + 8/32), 8 for E4M3 with
one scale a tensor. Sibling layers (q, k and v; gate and up) quantise and keep their common input once, see
`layers.siblings`. The output gradient is quantised in backward, and each copy is dropped after its product.

    forward      BitLinear.forward ─► MatmulContext ─► LowbitLinear.forward ─► forward_products
    backward                                           LowbitLinear.backward ─► backward_products

- `quantizations` lists what a recipe quantises.
- `context` splits and quantises each operand, with the layer's random keys, observer and weight cache.
- `function` computes the products, and `operand` keeps their operands for backward.
- `gemms` (bf16, fp16, fp32, fp64), `fp8`, `fp4` and `split` multiply.

In a compiled model, `layers.compiled` replaces `LowbitLinear` and calls the same two functions.
"""
