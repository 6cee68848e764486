"""Loss scaling, fp32 gradients and masters, norm and clipping: one optimizer step, and the facts about it."""
