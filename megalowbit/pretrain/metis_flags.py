"""The flags of Metis's training script, which `pretrain` answers with the page that translates them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megalowbit.errors import UserError
from megalowbit.one_line_parser import OneLineParser

# the table in docs/spectral.md, without "--": those that are keys of the configuration, and the others
METIS_FLAGS = """
    enable-lowbit q-forward-input q-forward-weight q-backward-input q-backward-weight q-backward-outputgrad
    q-scalar enable-backward-svd backward-lowrank-svd backward-lowrank-niter backward-longtail-schedule
    backward-broadcast-dim enable-activation-svd activation-lowrank-svd activation-lowrank-niter
    activation-longtail-schedule activation-broadcast-dim gradacc-broadcast gradacc-broadcast-steps
    use-power-iter activation-metis-mode gout-metis-mode enable-forward-svd forward-svd-rank
    forward-svd-warmup-steps forward-svd-merge-steps merged-lr enable-forward-svd-intime
    forward-lowrank-svd-intime enable-nv-recipe reg-lambda reg-alpha1 reg-alpha2 grad-clipping lr
    lr-warmup-steps weight-decay adam-beta1 adam-beta2 grad-acc batch-size train-steps save-steps seed
    win-size model layers embed-dim heads vocab-size dropout-prob n-kv-heads norm-eps rope-theta multiple-of
    ffn-dim-multiplier dataset-path tokenizer-path chkpt-dir log-dir tag new-tag load-from load-args-from
"""
WITHOUT_COUNTERPART = "tp-simulate enable-te max-epochs shuffle dataset-workers device reg-beta"


class PretrainParser(OneLineParser):
    """Says of a flag of Metis where its setting is here, before it asks for `--ds-config`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As the base class, but for a flag of Metis."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            self._refuse_flag_of_metis(word.partition("=")[0])
        return super().parse_known_args(words, namespace)

    def _refuse_flag_of_metis(self, flag: str) -> None:
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return
        page = "in the table of Metis's command line"
        if name in WITHOUT_COUNTERPART.split():
            raise UserError(
                f"{flag} has no key in the configuration here: docs/spectral.md says what replaces it, {page}"
            )
        if name in METIS_FLAGS.split():
            raise UserError(f"{flag} is a key of the configuration here: docs/spectral.md names it, {page}")
