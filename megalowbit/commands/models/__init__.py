"""Commands that read or write models: evaluate, generate, convert, quantize, recipes."""
