"""Studies: models × recipes × seeds × texts as a resumable grid of runs, and what their losses show."""
