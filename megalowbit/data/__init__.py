"""Training data: corpora, tokenisation, packing into fixed-length samples, and a resumable sharded loader."""
