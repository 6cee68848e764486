"""Loss scaling, fp32 gradients and master weights, norm and clipping, and the report of an optimizer step."""
