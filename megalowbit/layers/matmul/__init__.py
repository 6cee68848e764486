"""The three products of a low-bit layer, from operands to gradients.

    forward      BitLinear.forward ─► MatmulContext ─► LowbitLinear.forward ─► forward_products
    backward                                           LowbitLinear.backward ─► backward_products

`quantizations` says what a recipe quantises; `context` splits and quantises each operand, with the layer's
random keys, observer and weight cache; `function` puts products together and `operand` keeps for backward
what they need; `gemms`, `fp8`, `fp4` and `split` multiply. In a compiled model `layers.compiled` stands in
the place of `LowbitLinear` and calls the same two functions.
"""
